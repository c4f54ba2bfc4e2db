package decoder

import (
	"math"
	"reflect"

	"gorgonia.org/leanattention/rope"
)

// rotary reads rope_parameters, or rope_theta and rope_scaling, the fields until 2025.
func (c *Config) rotary(headDim int) rope.Config {
	r := rope.Config{HeadDim: headDim, Base: c.Positive("rope_theta", 10000)}
	c.partial(&r)
	c.rope(&r, c.ropeObject())
	return r
}

// ropeObject returns the object of the rotary embedding; nil: none.
func (c *Config) ropeObject() *Config {
	if c.Has("rope_parameters") {
		var parameters, scaling any
		if c.Read("rope_parameters", &parameters); c.Read("rope_scaling", &scaling) && !reflect.DeepEqual(parameters, scaling) {
			c.fail(ErrUnsupported, "rope_scaling is %q, and rope_parameters has other values", short(c.read["rope_scaling"]))
		}
		return c.sub("rope_parameters")
	}
	c.ignore("rope_parameters")
	return c.sub("rope_scaling")
}

// rotaryByType reads the embeddings of layers with windows, and of the others.
func (c *Config) rotaryByType(headDim int) (local, global rope.Config) {
	local = rope.Config{HeadDim: headDim, Base: c.Positive("rope_local_base_freq", 10000)}
	global = rope.Config{HeadDim: headDim, Base: c.Positive("rope_theta", 1000000)}
	o := c.ropeObject()
	if o == nil {
		return local, global
	}
	if o.Has("sliding_attention") || o.Has("full_attention") {
		c.rope(&local, o.sub("sliding_attention"))
		c.rope(&global, o.sub("full_attention"))
		o.end()
		if c.err == nil {
			c.err = o.err
		}
		return local, global
	}
	c.rope(&global, o)
	return local, global
}

// partial reads the part of a head that is rotated.
func (c *Config) partial(r *rope.Config) {
	if !c.Has("partial_rotary_factor") {
		c.ignore("partial_rotary_factor")
		return
	}
	factor := c.Positive("partial_rotary_factor")
	r.Dim = int(float64(r.HeadDim) * factor)
	if factor == 1 {
		r.Dim = 0 // all
		return
	}
	if factor > 1 || r.Dim < 2 || r.Dim%2 != 0 {
		c.Errorf("partial_rotary_factor is %v: %d of %d elements of a head; the number must be even, and in [2, %d]", factor, r.Dim, r.HeadDim, r.HeadDim)
		r.Dim = 0
	}
}

// rope reads the object o of a rotary embedding. nil changes nothing.
func (c *Config) rope(r *rope.Config, o *Config) {
	if o == nil {
		return
	}
	defer func() {
		o.end()
		if c.err == nil {
			c.err = o.err
		}
	}()
	r.Base = o.Positive("rope_theta", r.Base)
	o.partial(r)
	kind := "default"
	o.Read("type", &kind) // the name until 2024
	o.Read("rope_type", &kind)
	original := func() int {
		context := 0
		if c.Has("original_max_position_embeddings") {
			context = c.Size("original_max_position_embeddings")
		} else if c.Has("max_position_embeddings") {
			context = c.Size("max_position_embeddings")
		}
		return o.Size("original_max_position_embeddings", context)
	}
	optional := func(name string) (x float64) { // 0: the default of rope.Config
		o.Read(name, &x)
		return x
	}
	switch kind {
	case "default":
	case "linear":
		r.Scaling = rope.Linear{Factor: o.Positive("factor")}
	case "llama3":
		r.Scaling = rope.Llama3{
			Factor: o.Positive("factor"), Context: original(),
			LowFrequency: o.Positive("low_freq_factor"), HighFrequency: o.Positive("high_freq_factor"),
		}
	case "yarn":
		truncate := true
		o.Read("truncate", &truncate)
		r.Scaling = rope.YaRN{
			Factor: o.Positive("factor"), Context: original(), BetaFast: optional("beta_fast"), BetaSlow: optional("beta_slow"),
			Attention: optional("attention_factor"), MScale: optional("mscale"), MScaleAllDim: optional("mscale_all_dim"),
			NoTruncate: !truncate,
		}
	case "dynamic":
		// The base depends on the context that the engine is opened for.
		factor, trained := o.Positive("factor"), c.Size("max_position_embeddings")
		o.ignore("original_max_position_embeddings")
		if n := float64(c.context) / float64(trained); n > 1 {
			dim := float64(r.HeadDim)
			if r.Dim > 0 {
				dim = float64(r.Dim)
			}
			r.Base *= math.Pow(factor*n-(factor-1), dim/(dim-2))
		}
	case "longrope":
		r.Scaling = c.longRoPE(o, original(), optional("attention_factor"))
	default:
		o.refuse("rope_type", kind, []string{"default", "dynamic", "linear", "llama3", "longrope", "yarn"})
	}
}

// longRoPE reads two lists of factors, and returns the one for the context that the engine is opened for.
func (c *Config) longRoPE(o *Config, original int, attention float64) rope.LongRoPE {
	var short, long []float64
	o.Need("short_factor", &short)
	o.Need("long_factor", &long)
	factor := 0.0
	if o.Read("factor", &factor); factor == 0 && c.Has("max_position_embeddings") {
		factor = float64(c.Size("max_position_embeddings")) / float64(original)
	}
	if attention == 0 {
		if attention = 1; factor > 1 {
			attention = math.Sqrt(1 + math.Log(factor)/math.Log(float64(original)))
		}
	}
	if c.context > original {
		short = long
	}
	return rope.LongRoPE{Factors: short, Attention: attention}
}
