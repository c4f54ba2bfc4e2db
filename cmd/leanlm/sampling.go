package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"

	"gorgonia.org/leanattention/decoder"
)

// samplingFlags say how tokens are chosen. Flags that are not given have the values of the model's generation_config.json.
type samplingFlags struct {
	given  map[string]func(*decoder.Sampling) // by the flag's first name
	seeded bool
	bias   map[int]float64
	never  []int
}

func (s *samplingFlags) add(f *flags) {
	s.given, s.bias = map[string]func(*decoder.Sampling){}, map[int]float64{}
	number := func(names, usage string, set func(*decoder.Sampling, float64)) {
		first, _, _ := strings.Cut(names, ",")
		f.each(names, usage, func(text string) error {
			x, err := strconv.ParseFloat(text, 64)
			if err != nil {
				return errors.New("not a number")
			}
			s.given[first] = func(to *decoder.Sampling) { set(to, x) }
			return nil
		})
	}
	integer := func(names, usage string, set func(*decoder.Sampling, int)) {
		first, _, _ := strings.Cut(names, ",")
		f.each(names, usage, func(text string) error {
			n, err := strconv.Atoi(text)
			if err != nil {
				return errors.New("not a whole number")
			}
			s.given[first] = func(to *decoder.Sampling) { set(to, n) }
			return nil
		})
	}
	number("temp,temperature", "`temperature`; 0 takes the most likely token, 1 draws from the model's distribution", func(s *decoder.Sampling, x float64) { s.Temperature = x })
	integer("top-k", "draw from the `k` most likely tokens; 0: from all", func(s *decoder.Sampling, n int) { s.TopK = n })
	number("top-p", "draw from the fewest most likely tokens that have this `probability` together; 0 and 1: from all", func(s *decoder.Sampling, x float64) { s.TopP = x })
	number("min-p", "draw from tokens with at least this `share` of the most likely token's probability; 0: from all", func(s *decoder.Sampling, x float64) { s.MinP = x })
	number("typical,typical-p", "draw from the most typical tokens that have this `probability` together; 0 and 1: from all", func(s *decoder.Sampling, x float64) { s.TypicalP = x })
	number("repeat-penalty,repetition-penalty", "divides positive logits of tokens of the text, and multiplies negative ones, by this `number`; 1: no change", func(s *decoder.Sampling, x float64) { s.RepetitionPenalty = x })
	number("presence-penalty", "`number` that is subtracted from the logits of tokens of the text", func(s *decoder.Sampling, x float64) { s.PresencePenalty = x })
	number("frequency-penalty", "`number` that is subtracted as often as the text has the token", func(s *decoder.Sampling, x float64) { s.FrequencyPenalty = x })
	integer("repeat-last-n", "penalties look at the last `n` tokens; 0: at all", func(s *decoder.Sampling, n int) { s.LastTokens = n })
	f.each("s,seed", "`seed` of the random numbers; a random one if it is not given", func(text string) error {
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			return errors.New("not a whole number from 0 on")
		}
		s.seeded = true
		s.given["s"] = func(to *decoder.Sampling) { to.Seed = n }
		return nil
	})
	f.each("l,logit-bias", "`ID=NUMBER`: the number is added to the logit of the token; ID=-inf forbids the token; may be given several times", func(text string) error {
		name, value, ok := strings.Cut(text, "=")
		id, err := strconv.Atoi(name)
		if !ok || err != nil || id < 0 {
			return errors.New("not ID=NUMBER")
		}
		if value == "-inf" || value == "false" {
			s.never = append(s.never, id)
			return nil
		}
		x, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return errors.New("not ID=NUMBER")
		}
		s.bias[id] += x
		return nil
	})
}

// of returns the way of choosing tokens for a model. A random seed is told.
func (s *samplingFlags) of(model *opened, std streams) decoder.Sampling {
	c := model.Sampling()
	_, drawn := s.given["temp"]
	for name, set := range s.given {
		set(&c)
		drawn = drawn || name == "top-k" || name == "top-p" || name == "min-p" || name == "typical"
	}
	if _, ok := s.given["temp"]; drawn && !ok && c.Temperature == 0 {
		c.Temperature = 1 // these flags have no effect without drawing
	}
	for id, x := range s.bias {
		if c.LogitBias == nil {
			c.LogitBias = map[int]float64{}
		}
		c.LogitBias[id] += x
	}
	c.Forbidden = append(c.Forbidden, s.never...)
	if c.Temperature > 0 && !s.seeded {
		c.Seed = uint64(rand.Uint32())
		fmt.Fprintf(std.err, "seed %d\n", c.Seed)
	}
	return c
}
