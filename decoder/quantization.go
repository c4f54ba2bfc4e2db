package decoder

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// quantization is what quantization_config of a config.json says of the matrices of a folder.
type quantization struct {
	file   string // name of config.json, for errors
	method string // a key of quantizations
	bits   int    // of an element
	group  int    // elements of a row with one scale; 0: the whole row
	order  bool   // elements of a row are quantised in another order than that of the columns
	less   int    // by which stored zeros are less than the zeros
	zero   int    // all zeros; -1: any

	eight eightScales // not noEight: elements are of E4M3
	scale string      // the suffix of the tensor with the scales of E4M3
}

// quantizations has the methods: quantization_config.quant_method.
var quantizations = map[string]func(*Config, *quantization){"gptq": readGPTQ, "awq": readAWQ, "fp8": readFP8, "compressed-tensors": readCompressed}

// wayOut is the way out for a folder that is refused.
const wayOut = "use the model's folder in 16 bits, with -weights int4, int8 or fp8, or a GGUF file"

// quantization reads quantization_config; nil: the weights are not quantised. Every field is read, or is known to change no weight.
func (c *Config) quantization() *quantization {
	s := c.sub("quantization_config")
	if s == nil {
		return nil
	}
	q := &quantization{file: c.file, zero: -1}
	methods := []string{}
	for name := range quantizations {
		methods = append(methods, name)
	}
	slices.Sort(methods)
	s.Need("quant_method", &q.method)
	read := quantizations[q.method]
	switch {
	case s.err != nil:
	case read == nil:
		s.fail(ErrUnsupported, "quant_method is %s, and the weights are quantized; known are %q", short(fmt.Appendf(nil, "%q", q.method)), methods)
	default:
		read(s, q)
		s.end()
	}
	if c.err == nil && s.err != nil {
		c.err = s.err
		if errors.Is(s.err, ErrUnsupported) {
			c.err = fmt.Errorf("%w: %s", s.err, wayOut)
		}
	}
	return q
}

// one refuses a number that is none of the known ones, and returns it.
func (c *Config) one(name string, known ...int) (n int) {
	c.Need(name, &n)
	if !slices.Contains(known, n) && c.err == nil {
		c.fail(ErrUnsupported, "%s is %d; known are %v", name, n, known)
	}
	return n
}

// groupSize reads the size of groups.
func (c *Config) groupSize() int {
	n := 0
	c.Need("group_size", &n)
	if n == -1 {
		return 0
	}
	if (n <= 0 || n%32 != 0 || n > 1<<20) && c.err == nil {
		c.fail(ErrUnsupported, "group_size is %d; known are -1 and multiples of 32", n)
		return 0
	}
	return n
}

// readGPTQ reads the fields that AutoGPTQ, GPTQModel and transformers write.
func readGPTQ(c *Config, q *quantization) {
	q.bits = c.one("bits", 4, 8)
	q.group, q.order = c.groupSize(), c.Flag("desc_act", false)
	if c.Flag("sym", true) && c.err == nil {
		q.zero = 1 << (q.bits - 1)
	} else if q.bits == 8 && c.err == nil {
		c.fail(ErrUnsupported, "sym is false and bits is 8; known is true")
	}
	// A name of the format may be in both fields.
	q.less = 1
	for _, name := range []string{"checkpoint_format", "format"} {
		if c.Has(name) && c.Choice(name, "gptq", "gptq", "gptq_v2") == "gptq_v2" {
			q.less = 0
		}
	}
	c.Choice("pack_dtype", "int32", "int32")
	c.Choice("method", "gptq", "gptq")
	c.is("is_marlin_format", false)
	c.is("rotation", nil)
	if c.Has("dynamic") {
		var rules map[string]any
		if c.Read("dynamic", &rules); len(rules) > 0 {
			c.fail(ErrUnsupported, "dynamic has rules for %d modules; known are none", len(rules))
		}
	}
	c.ignore(gptqWithoutEffect...)
}

// gptqWithoutEffect has fields of GPTQ's calibration, of the programs that read weights, and of which modules are quantised, which the
// tensors say.
var gptqWithoutEffect = strings.Fields(`
	damp_percent damp_auto_increment static_groups true_sequential model_name_or_path model_file_base_name meta lm_head dynamic
	dataset tokenizer use_cuda_fp16 model_seqlen block_name_to_quantize module_name_preceding_first_block batch_size pad_token_id use_exllama
	disable_exllama max_input_length exllama_config cache_block_outputs modules_in_block_to_quantize backend mse act_group_aware hyb_act
	quant_method bits`)

// readAWQ reads the fields that AutoAWQ and transformers write.
func readAWQ(c *Config, q *quantization) {
	q.bits = c.one("bits", 4)
	q.group = c.groupSize()
	c.is("zero_point", true)
	version := "gemm"
	if c.Read("version", &version); strings.ToLower(version) != "gemm" {
		c.fail(ErrUnsupported, "version is %s; known is gemm", short(fmt.Appendf(nil, "%q", version)))
	}
	c.ignore("modules_to_not_convert", "backend", "do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config", "quant_method")
}
