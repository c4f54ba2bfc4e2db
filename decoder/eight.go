package decoder

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/decoder/internal/hf"
	"gorgonia.org/leanattention/nn"
)

// Matrices in E4M3: name.weight has the numbers, and a second tensor their scales: one for the matrix, one for each row, or one for each
// block of eightBlock x eightBlock.

const eightBlock = 128

// eightScales says which scales there are.
type eightScales uint8

const (
	noEight       eightScales = iota // integers
	eightByTensor                    // name.weight_scale has one number
	eightByRow                       // name.weight_scale has a number for each row
	eightByBlock                     // name.weight_scale_inv or, by compressed-tensors, name.weight_scale
)

// readFP8 reads the fields of DeepSeek's, Qwen's and vLLM's folders. The scales of activations do not change weights: activations stay
// float32.
func readFP8(c *Config, q *quantization) {
	q.bits, q.eight, q.scale = 8, eightByTensor, "weight_scale"
	c.Choice("fmt", "e4m3", "e4m3")
	c.Choice("activation_scheme", "dynamic", "dynamic", "static")
	c.Choice("scale_fmt", "ue8m0", "ue8m0") // of scales that are float32 still
	if c.Has("weight_block_size") {
		c.blockSize("weight_block_size")
		q.eight, q.scale = eightByBlock, "weight_scale_inv"
	}
	c.is("kv_cache_scheme", nil)
	c.is("kv_cache_quant_method", nil)
	c.ignore("modules_to_not_convert", "ignored_layers", "quant_method", "weight_block_size")
}

// blockSize reads the size of blocks.
func (c *Config) blockSize(name string) {
	var size []int
	if c.Need(name, &size); !slices.Equal(size, []int{eightBlock, eightBlock}) {
		c.fail(ErrUnsupported, "%s is %v; known is [%d %d]", name, size, eightBlock, eightBlock)
	}
}

// readCompressed reads the fields of compressed-tensors, of FP8 weights.
func readCompressed(c *Config, q *quantization) {
	q.bits = 8
	c.Choice("format", "float-quantized", "float-quantized")
	c.Choice("quantization_status", "compressed", "compressed", "frozen")
	c.is("kv_cache_scheme", nil)
	for _, name := range []string{"sparsity_config", "transform_config"} {
		var fields map[string]any
		if c.Read(name, &fields); len(fields) > 0 && fields["format"] != "dense" {
			c.fail(ErrUnsupported, "%s has %d fields; known are none", name, len(fields))
		}
	}
	var groups map[string]json.RawMessage
	if c.Need("config_groups", &groups); len(groups) != 1 && c.err == nil {
		c.fail(ErrUnsupported, "config_groups has %d groups; known is one", len(groups))
	}
	for name, raw := range groups {
		g := parseConfig(c.file, c.object+"config_groups."+name+".", raw)
		g.compressedGroup(q)
		g.end()
		if c.err == nil {
			c.err = g.err
		}
	}
	c.ignore("ignore", "quant_method", "version", "global_compression_ratio")
}

// compressedGroup reads a group of modules of compressed-tensors.
func (c *Config) compressedGroup(q *quantization) {
	var targets []string
	if c.Need("targets", &targets); !slices.Equal(targets, []string{"Linear"}) && c.err == nil {
		c.fail(ErrUnsupported, "targets is %.200q; known is [\"Linear\"]", targets)
	}
	c.is("output_activations", nil)
	c.Choice("format", "float-quantized", "float-quantized")
	c.ignore("input_activations") // activations stay float32
	w := c.sub("weights")
	if w == nil {
		c.fail(ErrMissing, "weights")
		return
	}
	w.one("num_bits", 8)
	w.Choice("type", "int", "float")
	switch w.Choice("strategy", "", "tensor", "channel", "block") {
	case "tensor":
		q.eight = eightByTensor
	case "channel":
		q.eight = eightByRow
	case "block":
		q.eight = eightByBlock
		w.blockSize("block_structure")
	}
	q.scale = "weight_scale"
	w.is("symmetric", true)
	w.is("dynamic", false)
	w.is("group_size", nil)
	w.is("actorder", nil)
	w.ignore("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "block_structure")
	w.end()
	if c.err == nil {
		c.err = w.err
	}
}

// isEight reports whether a weight of the folder is in E4M3.
func (p *packed) isEight(name string) bool {
	of, _ := p.Stored(name)
	return p.how.eight != noEight && of == "F8_E4M3"
}

// eightTensors returns the tensors of a matrix in E4M3.
func (p *packed) eightTensors(m *packedMatrix) []hf.Weight {
	scale := hf.Weight{Name: m.module + "." + p.how.scale}
	_, stored := p.Stored(scale.Name)
	switch p.how.eight {
	case eightByTensor:
		if scale.Shape = []int{1}; len(stored) == 0 {
			scale.Shape = []int{}
		}
	case eightByRow:
		if scale.Shape = []int{m.out, 1}; len(stored) == 1 {
			scale.Shape = []int{m.out}
		}
	case eightByBlock:
		scale.Shape = []int{(m.out-1)/eightBlock + 1, (m.in-1)/eightBlock + 1}
	}
	return []hf.Weight{{Name: m.module + ".weight", Shape: []int{m.out, m.in}, Types: []string{"F8_E4M3"}}, scale}
}

// eightRows returns rows of a matrix in E4M3. p.mu must be held.
func (p *packed) eightRows(m *packedMatrix, from, to int) (*nn.Quantised, error) {
	tensors := p.eightTensors(m)
	scales, err := p.floats(tensors[1].Name, tensors[1].Shape)
	if err != nil {
		return nil, err
	}
	for i, x := range scales {
		if !(math.Abs(float64(x))*448 <= math.MaxFloat32) { // exact: arm64 would fuse a product and a difference
			return nil, p.fail(m, ErrUnsupported, "%s[%d] is %v, and makes infinite numbers", p.how.scale, i, x)
		}
	}
	q := &nn.Quantised{Format: "e4m3", Rows: to - from, Columns: m.in}
	data := p.spare.integers
	if to-from == m.out {
		data = fresh[byte](m.out * m.in)
	}
	if data, err = p.Bytes(data, tensors[0].Name, tensors[0].Shape); err != nil {
		return nil, err
	}
	if q.Data = data; to-from < m.out {
		p.spare.integers = data
		q.Data = slices.Clone(data[from*m.in : to*m.in])
	}
	if i := slices.IndexFunc(q.Data, func(b byte) bool { return b&0x7f == 0x7f }); i >= 0 {
		return nil, p.fail(m, ErrFormat, "weight[%d][%d] is NaN", from+i/m.in, i%m.in)
	}
	if p.how.eight == eightByBlock {
		q.Group = eightBlock
	}
	for row := from; row < to; row++ {
		switch p.how.eight {
		case eightByTensor:
			q.Scales = append(q.Scales, scales[0])
		case eightByRow:
			q.Scales = append(q.Scales, scales[row])
		case eightByBlock:
			n := (m.in-1)/eightBlock + 1
			q.Scales = append(q.Scales, scales[row/eightBlock*n:][:n]...)
		}
	}
	return q, nil
}

// floats reads a tensor of any shape.
func (p *packed) floats(name string, shape []int) (all []float32, err error) {
	data, err := p.Bytes(nil, name, shape)
	if err != nil {
		return nil, err
	}
	switch of, _ := p.Stored(name); of {
	case "F32":
		for at := 0; at < len(data); at += 4 {
			all = append(all, math.Float32frombits(binary.LittleEndian.Uint32(data[at:])))
		}
	case "F16":
		for at := 0; at < len(data); at += 2 {
			all = append(all, la.F16(binary.LittleEndian.Uint16(data[at:])).Float32())
		}
	case "BF16":
		for at := 0; at < len(data); at += 2 {
			all = append(all, la.BF16(binary.LittleEndian.Uint16(data[at:])).Float32())
		}
	default:
		return nil, fmt.Errorf("decoder: %s: tensor %.200s is %s: %w", p.Path(""), name, of, ErrUnsupported)
	}
	return all, nil
}

// decodeEight decodes a row.
func decodeEight(q *nn.Quantised, dst []float32, row int) {
	group := q.Group
	if group == 0 {
		group = q.Columns
	}
	scales := q.Scales[row*((q.Columns-1)/group+1):]
	for i, b := range q.Data[row*q.Columns:][:q.Columns] {
		// A number of 4 and 3 bits is one of float32, whose exponents are larger by 120; 0 has the exponent of a subnormal number.
		v := math.Float32frombits(uint32(b&0x7f)<<20) * 0x1p120
		if b >= 0x80 {
			v = -v
		}
		dst[i] = v * scales[i/group]
	}
}

// otherScales returns tensors of modules that no weight needs: the scales of activations.
func (p *packed) otherScales() (names []string) {
	for _, m := range p.matrices {
		if name := m.module + ".input_scale"; p.how.eight != noEight && p.Has(name) {
			names = append(names, name)
		}
	}
	return names
}

// matrixOf returns the module of a quantised matrix; nil: the weight is one tensor as it is.
func (p *packed) matrixOf(w *hf.Weight) *packedMatrix {
	module, ok := strings.CutSuffix(w.Name, ".weight")
	if !ok || len(w.Shape) != 2 || !p.Has(module+".qweight") && !p.isEight(w.Name) {
		return nil
	}
	return &packedMatrix{module: module, out: w.Shape[0], in: w.Shape[1]}
}
