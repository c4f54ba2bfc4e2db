package decoder

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const adapterFile = "adapter_config.json"

// mergeFirst tells what to do with an adapter that is not supported.
const mergeFirst = "merge the adapter into the weights with peft's merge_and_unload, and open the result"

// adapterOff lists the fields of adapter_config.json that change an adapter in a way that is not supported. The value of an entry
// lists the field's values without effect. Any other value is an error.
var adapterOff = map[string][]string{
	"alora_invocation_tokens": {"[]"},
	"arrow_config":            {},
	"bias":                    {`"none"`},
	"corda_config":            {},
	"enable_lora":             {},
	"ensure_weight_tying":     {"false"},
	"init_lora_weights":       {"true", "false", `"gaussian"`, `"orthogonal"`, `"eva"`}, // others change the weights of the model
	"kasa_config":             {},
	"layer_replication":       {"[]"},
	"loftq_config":            {"{}"},
	"lora_bias":               {"false"},
	"lora_ga_config":          {},
	"megatron_config":         {},
	"merge_weights":           {"false"},
	"modules_to_save":         {"[]"},
	"monteclora_config":       {},
	"target_parameters":       {"[]"},
	"task_type":               {`"CAUSAL_LM"`},
	"trainable_token_indices": {"[]", "{}"},
	"use_bdlora":              {"false"},
	"use_dora":                {"false"},
	"use_qalora":              {"false"},
	"velora_config":           {},
}

// adapterNotes lists the fields of adapter_config.json without effect on a merged adapter. fan_in_fan_out is for layers with
// transposed matrices. As in peft, the field has no effect on linear layers, and the families have no other layers.
var adapterNotes = strings.Fields(`
	auto_mapping base_model_name_or_path eva_config fan_in_fan_out inference_mode layers_pattern lora_dropout megatron_core
	peft_version qalora_group_size revision`)

// adapterConfig is the content of an adapter_config.json.
type adapterConfig struct {
	file     string
	rank     int
	alpha    float64
	root     bool    // the scale is alpha / sqrt(rank), and not alpha / rank
	targets  modules // that have an adapter
	excluded modules
	layers   []int // with modules of targets; nil: all
	ranks    []pattern
	alphas   []pattern
}

// modules is a set of names of modules.
type modules struct {
	list []string       // a name, or the end of a name after a dot
	all  bool           // all linear layers but the head
	expr *regexp.Regexp // of whole names
}

// pattern is an entry of rank_pattern or alpha_pattern: a regular expression for the end of a name, after a dot.
type pattern struct {
	plain string         // letters, digits, and dots for any character
	expr  *regexp.Regexp // any other expression
	value float64
}

const (
	mostNames = 1 << 13 // names or patterns of a field
	mostBytes = 1 << 10 // bytes of a regular expression
	mostExprs = 1 << 19 // bytes of all regular expressions of a field
	mostWork  = 1 << 22 // bytes of all regular expressions, times modules
)

// plain matches a regular expression without operators but the dot.
var plain = regexp.MustCompile(`^[A-Za-z0-9_.]*$`)

// readAdapterConfig reads an adapter_config.json. A field that is not known is an error, unless the field is null.
func readAdapterConfig(file string, data []byte) (*adapterConfig, error) {
	c := parseConfig(file, "", data)
	a := &adapterConfig{file: file}
	var kind string
	if c.Need("peft_type", &kind); c.err == nil && kind != "LORA" {
		c.fail(ErrUnsupported, "peft_type is %q, and not LORA: %s", short([]byte(kind)), mergeFirst)
	}
	for _, name := range slices.Sorted(maps.Keys(adapterOff)) {
		raw, ok := c.raw(name)
		c.ignore(name)
		if value := strings.Join(strings.Fields(string(raw)), ""); ok && value != "null" && !slices.Contains(adapterOff[name], value) {
			c.fail(ErrUnsupported, "%s is %q, which is not supported: %s", name, short(raw), mergeFirst)
		}
	}
	c.Flag("fan_in_fan_out", false)
	c.ignore(adapterNotes...)
	a.rank = c.Size("r")
	c.Need("lora_alpha", &a.alpha)
	a.root = c.Flag("use_rslora", false)
	a.targets = c.modules("target_modules", true)
	a.excluded = c.modules("exclude_modules", false)
	if c.Has("layers_to_transform") {
		var one int
		raw, _ := c.raw("layers_to_transform")
		if json.Unmarshal(raw, &one) == nil {
			a.layers = []int{one}
			c.ignore("layers_to_transform")
		} else {
			c.Read("layers_to_transform", &a.layers)
		}
	}
	a.ranks = c.patterns("rank_pattern", func(x float64) bool { return x >= 1 && x < math.MaxInt32 && x == math.Trunc(x) })
	a.alphas = c.patterns("alpha_pattern", func(float64) bool { return true })
	c.ignore("layers_to_transform", "rank_pattern", "alpha_pattern", "exclude_modules")
	for _, name := range slices.Sorted(maps.Keys(c.left)) {
		if string(c.left[name]) != "null" {
			c.fail(ErrUnsupported, "%q is %q, which is not known: if the field has no effect on the adapter, remove it", short([]byte(name)), short(c.left[name]))
		}
	}
	return a, c.err
}

// modules reads a list of modules, or a regular expression.
func (c *Config) modules(name string, needed bool) (m modules) {
	if !c.Has(name) {
		if needed {
			c.fail(ErrMissing, "%s", name)
		}
		return m
	}
	var text string
	if raw, _ := c.raw(name); json.Unmarshal(raw, &text) != nil {
		c.Read(name, &m.list)
		if len(m.list) > mostNames {
			c.fail(ErrUnsupported, "%s has %d names, more than %d", name, len(m.list), mostNames)
		}
		return m
	}
	c.ignore(name)
	if strings.EqualFold(text, "all-linear") {
		m.all = true
		return m
	}
	m.expr = c.expression(name, text, "^(?:%s)$")
	return m
}

// expression compiles a regular expression of Python. Counted repetitions and Unicode classes are refused: their programs are not
// in proportion to the text.
func (c *Config) expression(name, text, format string) *regexp.Regexp {
	if len(text) > mostBytes || strings.Contains(text, "{") || strings.Contains(strings.ToLower(text), `\p`) {
		c.fail(ErrUnsupported, "%s has the regular expression %q of %d bytes; at most %d, without { and \\p, are read: list the modules", name, short([]byte(text)), len(text), mostBytes)
		return nil
	}
	_, err := regexp.Compile(text) // alone: brackets of the format must not complete those of the text
	var e *regexp.Regexp
	if err == nil {
		e, err = regexp.Compile(fmt.Sprintf(format, text))
	}
	if err != nil {
		c.fail(ErrUnsupported, "%s has the regular expression %q, which Go cannot read: list the modules", name, short([]byte(text)))
	}
	return e
}

// patterns reads an object of regular expressions and numbers, in the file's order.
func (c *Config) patterns(name string, right func(float64) bool) (all []pattern) {
	if !c.Has(name) {
		return nil
	}
	raw, _ := c.raw(name)
	d := json.NewDecoder(bytes.NewReader(raw))
	bad := func(err error) []pattern {
		c.fail(ErrFormat, "%s is %q, not an object of numbers: %v", name, short(raw), err)
		return nil
	}
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return bad(errors.Join(err, errors.New("no object")))
	}
	seen, work := map[string]bool{}, 0
	for d.More() && c.err == nil {
		t, err := d.Token()
		if err != nil {
			return bad(err)
		}
		key := t.(string) // the decoder allows only strings as keys
		var x float64
		switch err := d.Decode(&x); {
		case err != nil:
			return bad(err)
		case seen[key]:
			return bad(fmt.Errorf("%q is there twice", short([]byte(key))))
		case !right(x):
			return bad(fmt.Errorf("%v", x))
		case len(all) == mostNames:
			c.fail(ErrUnsupported, "%s has more than %d entries", name, mostNames)
			return nil
		}
		seen[key] = true
		p := pattern{plain: key, value: x}
		if !plain.MatchString(key) {
			if work += len(key); work > mostExprs {
				c.fail(ErrUnsupported, "%s has more than %d bytes of regular expressions: list the modules", name, mostExprs)
				return nil
			}
			p.expr = c.expression(name, key, `^(?:.*\.)?(?:%s)$`)
		}
		all = append(all, p)
	}
	return all
}

// has reports whether a module is in the set.
func (m *modules) has(module string) bool {
	switch {
	case m.expr != nil:
		return m.expr.MatchString(module)
	case m.all:
		return module != "lm_head"
	}
	return slices.ContainsFunc(m.list, func(name string) bool { return module == name || strings.HasSuffix(module, "."+name) })
}

// targeted reports whether peft gives a module an adapter.
func (a *adapterConfig) targeted(module string) bool {
	if a.excluded.has(module) || !a.targets.has(module) {
		return false
	}
	if len(a.layers) == 0 || a.targets.list == nil || slices.Contains(a.targets.list, module) {
		return true
	}
	parts := strings.Split(module, ".")
	for i := 2; i < len(parts)-1; i++ {
		if n, err := strconv.Atoi(parts[i]); err == nil {
			return slices.Contains(a.layers, n)
		}
	}
	return false
}

// matches reports whether a module matches the pattern.
func (p *pattern) matches(module string) bool {
	if p.expr != nil {
		return p.expr.MatchString(module)
	}
	start := len(module) - len(p.plain)
	if start < 0 || start > 0 && module[start-1] != '.' {
		return false
	}
	for i := range len(p.plain) {
		if p.plain[i] != '.' && p.plain[i] != module[start+i] {
			return false
		}
	}
	return true
}

// work returns the bytes of the regular expressions.
func (a *adapterConfig) work() (n int) {
	add := func(e *regexp.Regexp) {
		if e != nil {
			n += len(e.String())
		}
	}
	add(a.targets.expr)
	add(a.excluded.expr)
	for _, all := range [][]pattern{a.ranks, a.alphas} {
		for _, p := range all {
			add(p.expr)
		}
	}
	return n
}

// of returns the value of the first pattern that a module matches, or the value of all other modules.
func of(all []pattern, module string, otherwise float64) float64 {
	for _, p := range all {
		if p.matches(module) {
			return p.value
		}
	}
	return otherwise
}

// scale returns the factor of B A of a module with an adapter of a rank.
func (a *adapterConfig) scale(module string, rank int) (float64, error) {
	if want := int(of(a.ranks, module, float64(a.rank))); rank != want {
		return 0, fmt.Errorf("decoder: %s: module %.200q has rank %d in the tensors, and %d by r and rank_pattern: %w", a.file, module, rank, want, ErrFormat)
	}
	alpha := of(a.alphas, module, a.alpha)
	if a.root {
		return alpha / math.Sqrt(float64(rank)), nil
	}
	return alpha / float64(rank), nil
}
