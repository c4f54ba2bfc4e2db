package decoder

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"gorgonia.org/leanattention/decoder/internal/gguf"
)

// samplingPrefix begins the keys of a GGUF file that say how the authors choose tokens.
const samplingPrefix = "general.sampling."

// sampling reads the keys general.sampling.*. Without any, the sampling is otherwise. Values of absent keys are the defaults of
// llama.cpp (common/common.h, common_params_sampling).
func (f *ggufFile) sampling(vocab int, otherwise Sampling) (s Sampling, err error) {
	m := f.file.Metadata()
	fail := func(kind error, name, format string, args ...any) {
		if err == nil {
			err = fmt.Errorf("decoder: %s: metadata key %.200q is %s: %w", f.path, samplingPrefix+name, fmt.Sprintf(format, args...), kind)
		}
	}
	given := map[string]bool{}
	for _, key := range m.Keys() {
		if name, ok := strings.CutPrefix(key, samplingPrefix); ok {
			given[name] = true
		}
	}
	if len(given) == 0 {
		return otherwise, nil
	}
	has := func(name string) bool {
		is := given[name]
		delete(given, name)
		return is && err == nil
	}
	number := func(name string, x, least, most float64) float64 {
		if has(name) {
			if x, err = m.Float64(samplingPrefix + name); err != nil {
				return 0
			}
			if kind, _, _, _ := m.Kind(samplingPrefix + name); kind == gguf.Float32 { // the decimal number that was stored
				x, _ = strconv.ParseFloat(strconv.FormatFloat(x, 'g', -1, 32), 64)
			}
			if !(x >= least && x <= most) {
				fail(ErrFormat, name, "%v, not in [%v, %v]", x, least, most)
			}
		}
		return x
	}
	integer := func(name string, n, least int) int {
		if has(name) {
			if n, err = m.Int(samplingPrefix + name); err == nil && n < least {
				fail(ErrFormat, name, "%d, less than %d", n, least)
			}
		}
		return n
	}
	sequence := ""
	if has("sequence") {
		sequence, err = m.String(samplingPrefix + "sequence")
	}
	temperature, topK := number("temp", 0.8, 0, math.MaxFloat32), integer("top_k", 40, math.MinInt32)
	topP, minP := number("top_p", 0.95, 0, 1), number("min_p", 0.05, 0, 1)
	repetition := number("penalty_repeat", 1, math.SmallestNonzeroFloat32, math.MaxFloat32)
	last, hasLast := 64, given["penalty_last_n"]
	last = integer("penalty_last_n", last, -1)
	if x := number("xtc_probability", 0, 0, 1); x != 0 {
		fail(ErrUnsupported, "xtc_probability", "%v: tokens cannot be chosen this way", x)
	}
	number("xtc_threshold", 0, 0, 1)
	if n := integer("mirostat", 0, 0); n != 0 {
		fail(ErrUnsupported, "mirostat", "%d: tokens cannot be chosen this way", n)
	}
	number("mirostat_tau", 0, math.Inf(-1), math.Inf(1))
	number("mirostat_eta", 0, math.Inf(-1), math.Inf(1))
	for _, key := range m.Keys() {
		if name, ok := strings.CutPrefix(key, samplingPrefix); ok && given[name] {
			fail(ErrUnsupported, name, "not known: tokens cannot be chosen this way")
		}
	}
	if sequence != "" {
		steps := samplers(sequence)
		if steps == nil {
			fail(ErrUnsupported, "sequence", "%.200q; penalties, temperature, top_k, top_p and min_p are applied in this order, with temperature last, too", sequence)
		}
		for name, off := range map[string]func(){
			"penalties": func() { repetition = 1 }, "temperature": func() { temperature = 1 }, "top_k": func() { topK = 0 },
			"top_p": func() { topP = 1 }, "min_p": func() { minP = 0 },
		} {
			if !slices.Contains(steps, name) {
				off()
			}
		}
	}
	if err != nil {
		return Sampling{}, err
	}
	switch last {
	case -1: // the whole text
		last = 0
	case 0: // no penalties
		repetition = 1
	}
	if repetition != 1 {
		s.RepetitionPenalty = repetition
	}
	if repetition != 1 || hasLast {
		s.LastTokens = last
	}
	if temperature == 0 {
		return s, nil
	}
	s.Temperature, s.MinP = temperature, minP
	if topK > 0 && topK < vocab {
		s.TopK = topK
	}
	switch topP {
	case 0:
		s.TopK = 1 // the set has at least one token
	case 1:
	default:
		s.TopP = topP
	}
	return s, nil
}

// samplers returns the steps of a sequence of llama.cpp that choose tokens, or nil if Sampling has another order. Steps that no
// metadata key turns on are left out. Temperature comes after the penalties, or last.
func samplers(sequence string) []string {
	order := []string{"penalties", "temperature", "top_k", "top_p", "min_p"}
	steps := []string{}
	all := strings.Split(sequence, ";")
	for i, name := range all {
		switch {
		case slices.Contains([]string{"dry", "top_n_sigma", "typ_p", "xtc"}, name):
		case slices.Contains(steps, name) || !slices.Contains(order, name):
			return nil
		case name == "temperature" && i == len(all)-1:
			steps = append(steps, name)
			return steps
		default:
			if n := len(steps); n > 0 && slices.Index(order, steps[n-1]) > slices.Index(order, name) {
				return nil
			}
			steps = append(steps, name)
		}
	}
	return steps
}
