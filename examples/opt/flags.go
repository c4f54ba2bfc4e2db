package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"strconv"
	"strings"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/opt/files"
	"gorgonia.org/leanattention/examples/opt/model"
	"gorgonia.org/leanattention/examples/opt/sample"

	"gorgonia.org/tensor"
)

// options is what the flags say.
type options struct {
	model     string // empty: the one that is part of the program
	prompts   []string
	tokens    int
	attention model.Attention
	schedule  la.Schedule // of lean
	linear    model.Linear
	weights   tensor.Dtype // zero: as stored
	cache     tensor.Dtype
	sampling  sample.Config
	workers   int
	gpu       int // -1: none
	stats     bool

	ahead bool // for tests: tokens are computed before others are looked at, on the CPU too
}

// usageError is a wrong flag or value of a flag.
type usageError struct{ text string }

func (e usageError) Error() string { return e.text }

func usagef(format string, args ...any) error { return usageError{fmt.Sprintf(format, args...)} }

var errHelp = flag.ErrHelp

const usage = `opt continues texts with an OPT model:

  opt -prompt "Once upon a time" [-prompt ...] [flags]

`

// parse reads the flags; -h writes what there is to help.
func parse(args []string, help io.Writer) (options, error) {
	var o options
	var attention, linear, weights, cache, device string
	f := flag.NewFlagSet("opt", flag.ContinueOnError)
	f.SetOutput(io.Discard) // run says what is wrong, in one line
	f.StringVar(&o.model, "model", "", "`folder` of a Hugging Face OPT model (default: a small model that is part of the program)")
	f.Func("prompt", "`text` to continue; given several times, the texts are continued together", func(s string) error {
		o.prompts = append(o.prompts, s)
		return nil
	})
	f.Func("prompts", "`file` of texts to continue together, one a line; empty lines are none", func(name string) error {
		text, err := files.Stream(name, maxPrompts)
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(text)) {
			if line = strings.TrimRight(line, "\r\n"); line != "" {
				o.prompts = append(o.prompts, line)
			}
		}
		return nil
	})
	f.IntVar(&o.tokens, "n", 128, "most `tokens` to add to a prompt")
	f.StringVar(&attention, "attn", "lean", "attention: lean; fixed or head, the same by FlashDecoding's schedule (every head's keys in 8 splits) or FlashAttention-2's (one worker a head); default (made of Gorgonia's own nodes; on a GPU the same in three launches), or fused (such nodes without a cache, rewritten)")
	f.StringVar(&linear, "linear", "lean", "linear layers: lean, or stock (Gorgonia's own nodes)")
	f.StringVar(&weights, "weights", "stored", "element type that the weights are rounded to and kept in: f32, f16, bf16, or stored, as the folder has them (-linear stock widens them to compute)")
	f.StringVar(&cache, "cache", "f32", "element type of lean's cache: f32, f16 or bf16")
	f.Float64Var(&o.sampling.Temperature, "temperature", 0, "0 takes the most likely token; 1 samples from the model's distribution, more from a flatter one")
	f.IntVar(&o.sampling.TopK, "top-k", 0, "sample from the `k` most likely tokens only; 0: all")
	f.Float64Var(&o.sampling.TopP, "top-p", 1, "sample from the fewest most likely tokens that have probability `p`; 0 or 1: all")
	f.Uint64Var(&o.sampling.Seed, "seed", 0, "`number` that chooses the random numbers; the same one gives the same text on the same kind of device")
	f.IntVar(&o.workers, "workers", 0, "`workers` of lean's attention; 0: one a core")
	f.StringVar(&device, "device", "cpu", "what computes: cpu, gpu (the first one) or gpu:`n`; a GPU needs an NVIDIA driver and nothing else")
	f.BoolVar(&o.stats, "stats", false, "write speed and the share of attention to standard error")

	if err := f.Parse(args); errors.Is(err, flag.ErrHelp) {
		f.SetOutput(help)
		fmt.Fprint(help, usage)
		f.PrintDefaults()
		return o, errHelp
	} else if err != nil {
		return o, usagef("%v", err)
	}

	var known bool
	if o.attention, o.schedule, known = model.AttentionNamed(attention); !known {
		return o, usagef("-attn %q is none of lean, fixed, head, default, fused", attention)
	}
	if o.linear, known = map[string]model.Linear{"lean": model.LeanLinear, "stock": model.StockLinear}[linear]; !known {
		return o, usagef("-linear %q is neither lean nor stock", linear)
	}
	if o.weights, known = map[string]tensor.Dtype{"stored": {}, "f32": tensor.Float32, "f16": la.Float16, "bf16": la.BFloat16}[weights]; !known {
		return o, usagef("-weights %q is none of stored, f32, f16, bf16", weights)
	}
	if o.cache, known = map[string]tensor.Dtype{"f32": tensor.Float32, "f16": la.Float16, "bf16": la.BFloat16}[cache]; !known {
		return o, usagef("-cache %q is none of f32, f16, bf16", cache)
	}
	o.gpu = -1
	switch number, numbered := strings.CutPrefix(device, "gpu:"); {
	case device == "cpu":
	case device == "gpu":
		o.gpu = 0
	case numbered:
		n, err := strconv.Atoi(number)
		if err != nil || n < 0 {
			return o, usagef("-device %q has no number of a GPU", device)
		}
		o.gpu = n
	default:
		return o, usagef("-device %q is none of cpu, gpu, gpu:n", device)
	}
	switch {
	case o.gpu >= 0 && (o.attention == model.Fused || o.linear != model.LeanLinear):
		return o, usagef("-device %s has neither -attn fused nor -linear stock: Gorgonia's own nodes have no GPU here", device)
	case f.NArg() > 0:
		return o, usagef("%q is not a flag; texts are given by -prompt", f.Arg(0))
	case len(o.prompts) == 0:
		return o, usagef("no -prompt, and nothing in a file of -prompts")
	case o.tokens < 1:
		return o, usagef("-n %d is less than 1", o.tokens)
	case o.workers < 0 || o.workers > maxWorkers:
		return o, usagef("-workers %d is outside [0, %d]", o.workers, maxWorkers)
	case o.attention != model.Lean && o.gpu < 0 && o.cache != tensor.Float32:
		return o, usagef("-cache %s needs -attn lean: Gorgonia computes nothing in that type", cache)
	case o.attention != model.Lean && o.workers != 0:
		return o, usagef("-workers needs -attn lean")
	}
	if err := o.sampling.Validate(); err != nil {
		return o, usagef("%v", err)
	}
	return o, nil
}

// maxPrompts bounds a file of prompts. A model reads some KB of each.
const maxPrompts = 256 << 20

// maxWorkers is what leanattention takes.
const maxWorkers = 1 << 12
