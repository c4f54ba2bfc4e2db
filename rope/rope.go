// Package rope describes rotary position embeddings (RoPE), and how they are scaled to long contexts.
package rope

import (
	"fmt"
	"math"
	"reflect"

	"gorgonia.org/leanattention/internal/errs"
)

// Config is a rotary position embedding (RoPE). It rotates pairs of elements of the heads of queries and keys by the position
// of their token. Pair i, the elements (a, b) of a head, becomes at position p
//
//	m (a cos(p w[i]) - b sin(p w[i]))
//	m (b cos(p w[i]) + a sin(p w[i])),   w[i] = Base^(-2i/Dim)
//
// Equation 34 of Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding",
// arXiv:2104.09864. A Scaling changes w and m. Without a Scaling m is 1.
type Config struct {
	HeadDim int // elements of a head

	// Dim is the number of rotated elements: the first Dim elements of each head. It is even. 0 is HeadDim. The
	// partial_rotary_factor of a checkpoint is Dim/HeadDim.
	Dim int

	// Last says that the last Dim elements of each head are rotated, and not the first ones, as in DeepSeek's latent attention.
	Last bool

	Base float64 // a checkpoint's rope_theta; 0: 10000

	// Interleaved says that pair i is elements 2i and 2i+1, as in RoFormer and GPT-J. Otherwise pair i is elements
	// i and i+Dim/2, as in GPT-NeoX and Llama (rotate_half in transformers).
	Interleaved bool

	Scaling Scaling // for contexts longer than those of the training; nil: none
}

// Scaling changes the frequencies w and the factor m of a rotary embedding, for contexts longer than those of the training.
// A Scaling is a [Linear], a [Llama3], a [YaRN] or a [LongRoPE].
type Scaling interface {
	// check is what is wrong with it, "" for nothing.
	check() string
	// apply changes w, and is m.
	apply(w []float64, c *Config) (m float64)
}

// Linear divides positions by Factor (position interpolation, Chen et al., arXiv:2306.15595). Checkpoints have the rope_type
// "linear".
type Linear struct{ Factor float64 }

// Llama3 is the scaling of Llama 3.1 and later. Checkpoints have the rope_type "llama3". A frequency w with the wavelength
// 2 pi/w
//
//   - shorter than Context/HighFrequency stays
//   - longer than Context/LowFrequency is divided by Factor
//   - between the two becomes (1-s) w/Factor + s w, where s = (Context w/(2 pi) - LowFrequency) / (HighFrequency - LowFrequency)
type Llama3 struct {
	Factor        float64
	LowFrequency  float64 // low_freq_factor
	HighFrequency float64 // high_freq_factor; more than LowFrequency
	Context       int     // original_max_position_embeddings
}

// YaRN is the scaling of Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", arXiv:2309.00071.
// Checkpoints have the rope_type "yarn". A frequency with
//
//   - more than BetaFast rotations in Context stays
//   - fewer than BetaSlow rotations is divided by Factor
//   - a number between the two is on a linear ramp over the pairs
//
// Cosines and sines are multiplied by m (section 3.4 of the paper):
//
//	m = 0.1 ln(Factor) + 1
type YaRN struct {
	Factor   float64 // at least 1
	Context  int     // original_max_position_embeddings
	BetaFast float64 // 0: 32
	BetaSlow float64 // 0: 1

	// Attention is m, the attention_factor of a checkpoint. If it is 0, m is the formula above. If also MScale and
	// MScaleAllDim are above 0, as in DeepSeek, m is (0.1 MScale ln(Factor) + 1) / (0.1 MScaleAllDim ln(Factor) + 1).
	Attention, MScale, MScaleAllDim float64

	// NoTruncate keeps the exact ends of the ramp. Otherwise the ends are rounded outwards to whole pairs. gpt-oss has
	// "truncate": false.
	NoTruncate bool
}

// LongRoPE divides each frequency by a factor of its own (Ding et al., arXiv:2402.13753). Checkpoints have the rope_type
// "longrope", and two lists of factors: short_factor for contexts of at most original_max_position_embeddings, and long_factor
// for longer ones.
type LongRoPE struct {
	Factors []float64 // of each pair; above 0

	// Attention is m. 0 is 1. A checkpoint without attention_factor has
	// sqrt(1 + ln(max_position_embeddings / original) / ln(original)), or 1 if max_position_embeddings is not above original.
	Attention float64
}

// Frequencies returns w, in radians a position, one for each pair, and m. The number of rotated elements of a head is
// 2*len(w).
//
// Errors: ErrShape (HeadDim, Dim), ErrOption (Base, Scaling).
func (c Config) Frequencies() (w []float64, m float64, err error) {
	const op = "rope.Config"
	dim := c.rotated()
	switch {
	case c.HeadDim < 1:
		return nil, 0, errs.Errorf(op, errs.ErrShape, "HeadDim is %d", c.HeadDim)
	case dim < 2 || dim > c.HeadDim || dim%2 != 0:
		return nil, 0, errs.Errorf(op, errs.ErrShape, "%d elements of heads of %d are turned; it must be an even number of them", dim, c.HeadDim)
	case c.Base != 0 && !(c.Base > 1 && !math.IsInf(c.Base, 0)):
		return nil, 0, errs.Errorf(op, errs.ErrOption, "Base is %v; it must be more than 1, and finite", c.Base)
	}
	w, m = make([]float64, dim/2), 1
	for i := range w {
		w[i] = math.Pow(c.base(), -2*float64(i)/float64(dim))
	}
	if c.Scaling == nil {
		return w, m, nil
	}
	if v := reflect.ValueOf(c.Scaling); v.Kind() == reflect.Pointer && v.IsNil() {
		return nil, 0, errs.Errorf(op, errs.ErrOption, "Scaling is a nil %T; leave it out for no scaling", c.Scaling)
	}
	if wrong := c.Scaling.check(); wrong != "" {
		return nil, 0, errs.Errorf(op, errs.ErrOption, "%T: %s", c.Scaling, wrong)
	}
	if l, ok := c.Scaling.(LongRoPE); ok && len(l.Factors) != len(w) {
		return nil, 0, errs.Errorf(op, errs.ErrShape, "LongRoPE has %d factors for %d pairs", len(l.Factors), len(w))
	}
	return w, c.Scaling.apply(w, &c), nil
}

// rotated is Dim, or HeadDim if Dim is 0.
func (c *Config) rotated() int {
	if c.Dim == 0 {
		return c.HeadDim
	}
	return c.Dim
}

func (c *Config) base() float64 {
	if c.Base == 0 {
		return 10000
	}
	return c.Base
}

func isFactor(x float64) bool { return x >= 1 && !math.IsInf(x, 0) }

func (s Linear) check() string {
	if !(s.Factor > 0) || math.IsInf(s.Factor, 0) {
		return "Factor must be a number above 0"
	}
	return ""
}

func (s Linear) apply(w []float64, _ *Config) float64 {
	for i := range w {
		w[i] /= s.Factor
	}
	return 1
}

func (s LongRoPE) check() string {
	for i, f := range s.Factors {
		if !(f > 0) || math.IsInf(f, 0) {
			return fmt.Sprintf("Factors[%d] is %v; it must be a number above 0", i, f)
		}
	}
	if !(s.Attention >= 0) || math.IsInf(s.Attention, 0) {
		return "Attention must be a number from 0 on"
	}
	return ""
}

func (s LongRoPE) apply(w []float64, _ *Config) float64 {
	for i := range w {
		w[i] /= s.Factors[i]
	}
	if s.Attention == 0 {
		return 1
	}
	return s.Attention
}

func (s Llama3) check() string {
	switch {
	case !isFactor(s.Factor):
		return "Factor must be a number from 1 on"
	case !(s.LowFrequency > 0 && s.HighFrequency > s.LowFrequency) || math.IsInf(s.HighFrequency, 0):
		return "LowFrequency must be above 0, and HighFrequency above that"
	case s.Context < 1:
		return "Context must be at least 1"
	}
	return ""
}

func (s Llama3) apply(w []float64, _ *Config) float64 {
	for i, f := range w {
		turns := float64(s.Context) * f / (2 * math.Pi)
		share := (turns - s.LowFrequency) / (s.HighFrequency - s.LowFrequency)
		share = min(max(share, 0), 1)
		w[i] = (1-share)*f/s.Factor + share*f
	}
	return 1
}

func (s YaRN) check() string {
	fast, slow := s.betas()
	switch {
	case !isFactor(s.Factor):
		return "Factor must be a number from 1 on"
	case s.Context < 1:
		return "Context must be at least 1"
	case !(slow > 0 && fast > slow) || math.IsInf(fast, 0):
		return "BetaSlow must be above 0, and BetaFast above that"
	case !(s.Attention >= 0) || math.IsInf(s.Attention, 0):
		return "Attention must be a number from 0 on"
	case !(s.MScale >= 0 && s.MScaleAllDim >= 0) || math.IsInf(s.MScale+s.MScaleAllDim, 0):
		return "MScale and MScaleAllDim must be numbers from 0 on"
	}
	return ""
}

// ScoreScale returns the factor by which models with MScaleAllDim multiply the scale of scores, besides the m of cosines and sines:
//
//	(0.1 MScaleAllDim ln(Factor) + 1)^2
//
// It is 1 without MScaleAllDim. DeepSeek-V2, V3 and MiniCPM3 have that factor.
func (s YaRN) ScoreScale() float64 {
	m := s.magnitude(s.MScaleAllDim)
	return m * m
}

// magnitude returns the factor m of a weight of ln(Factor). Factor is at least 1.
func (s YaRN) magnitude(scale float64) float64 { return 0.1*scale*math.Log(s.Factor) + 1 }

func (s YaRN) betas() (fast, slow float64) {
	fast, slow = s.BetaFast, s.BetaSlow
	if fast == 0 {
		fast = 32
	}
	if slow == 0 {
		slow = 1
	}
	return fast, slow
}

func (s YaRN) apply(w []float64, c *Config) float64 {
	// pairAt is the pair, not a whole one, that turns so often in the context.
	pairAt := func(turns float64) float64 {
		return float64(c.rotated()) * math.Log(float64(s.Context)/(turns*2*math.Pi)) / (2 * math.Log(c.base()))
	}
	fast, slow := s.betas()
	from, to := pairAt(fast), pairAt(slow)
	if !s.NoTruncate {
		from, to = math.Floor(from), math.Ceil(to)
	}
	from, to = max(from, 0), min(to, float64(c.rotated()-1))
	if from == to {
		to += 0.001 // a step: the ramp has no length
	}
	for i, f := range w {
		ramp := min(max((float64(i)-from)/(to-from), 0), 1)
		w[i] = ramp*f/s.Factor + (1-ramp)*f
	}
	if s.Attention > 0 {
		return s.Attention
	}
	if s.MScale > 0 && s.MScaleAllDim > 0 {
		return s.magnitude(s.MScale) / s.magnitude(s.MScaleAllDim)
	}
	return s.magnitude(1)
}
