package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/opt/model"
	"gorgonia.org/leanattention/examples/opt/sample"
	"gorgonia.org/leanattention/ranks"

	"gorgonia.org/tensor"
)

// options is the values of the flags.
type options struct {
	model       string // empty: the shipped model
	sources     []source
	prompts     []string // contents of the sources, after readPrompts
	promptCache string   // file; empty: none
	perplexity  string   // file; empty: texts are continued
	stride      int      // 0: a window
	interactive bool
	special     bool // names of special tokens in texts are the tokens
	tokens      int
	samples     int // texts of each prompt
	stops       []string
	sample      sample.Config
	attention   model.Attention
	schedule    la.Schedule // of lean
	linear      model.Linear
	weights     tensor.Dtype // zero: the stored type
	weightsName string
	cache       tensor.Dtype
	shard       la.Shard // of the cache over several GPUs
	draft       bool     // tokens are guessed, and the guesses are verified
	guesses     int      // most tokens of a draft
	workers     int
	chunk       int // 0: the decoder's default
	mixed       bool
	gpus        []int       // none: the CPU
	anyGPU      bool        // no ordinal is given
	world       ranks.World // the processes of the model, if there are several
	stats       bool
	json        bool
	logprobs    int

	flags []string // flags that ranks must have alike, and their values
	text  string   // contents of the file of -perplexity

	ahead bool // for tests: the CPU also computes tokens before others are read
}

// seed returns the seed that makes sampled texts again; nil: nothing is random.
func (o *options) seed() *uint64 {
	if o.sample.Temperature == 0 || o.perplexity != "" {
		return nil
	}
	return &o.sample.Seed
}

// texts is a flag that may be repeated.
type texts []string

func (t *texts) String() string { return fmt.Sprintf("%q", []string(*t)) }

func (t *texts) Set(s string) error {
	if s == "" || !utf8.ValidString(s) {
		return errors.New("not a text that could be written")
	}
	*t = append(*t, s)
	return nil
}

// usageError is a wrong flag or value of a flag.
type usageError struct{ text string }

func (e usageError) Error() string { return e.text }

func usagef(format string, args ...any) error { return usageError{fmt.Sprintf(format, args...)} }

var errHelp = flag.ErrHelp

// choices is a flag with a few values: a usage error names them.
type choices[T any] struct {
	names  []string
	values []T
}

func (c choices[T]) find(flag, name string) (value T, err error) {
	i := slices.Index(c.names, name)
	if i < 0 {
		return value, usagef("-%s %q is none of %s", flag, name, strings.Join(c.names, ", "))
	}
	return c.values[i], nil
}

var (
	linears      = choices[model.Linear]{[]string{"lean", "stock"}, []model.Linear{model.LeanLinear, model.StockLinear}}
	weightTypes  = choices[tensor.Dtype]{[]string{"stored", "f32", "f16", "bf16"}, []tensor.Dtype{{}, tensor.Float32, la.Float16, la.BFloat16}}
	shards       = choices[la.Shard]{[]string{"auto", "heads", "context"}, []la.Shard{la.ShardAuto, la.ShardHeads, la.ShardContext}}
	drafts       = choices[bool]{[]string{"none", "ngram"}, []bool{false, true}}
	elementTypes = choices[tensor.Dtype]{[]string{"f32", "f16", "bf16"}, []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16}}
)

// named is the flags whose value is a name, before the lookup.
type named struct{ attention, linear, weights, cache, shard, draft, device string }

// newFlags returns the flags, which write to o and n.
func newFlags(o *options, n *named) *flag.FlagSet {
	f := flag.NewFlagSet("opt", flag.ContinueOnError)
	f.SetOutput(io.Discard) // run reports errors in one line
	f.StringVar(&o.model, "model", "", "`folder` of a Hugging Face OPT model")
	f.Func("prompt", "`text` to continue; given several times, the texts are continued together; - is standard input, without the end of its last line", func(s string) error {
		o.sources = append(o.sources, source{text: s})
		return nil
	})
	f.Func("prompts", "`file` of texts to continue together, one a line; empty lines are none; - is standard input", func(name string) error {
		o.sources = append(o.sources, source{text: name, lines: true})
		return nil
	})
	f.BoolVar(&o.interactive, "i", false, "a session on a terminal: each line is put behind the text and continued; /help lists its commands")
	f.StringVar(&o.perplexity, "perplexity", "", "`file` of a text whose perplexity is told; - is standard input")
	f.IntVar(&o.stride, "stride", 0, "`tokens` from one window of -perplexity to the next, each of the model's positions; 0: windows side by side")
	f.StringVar(&o.promptCache, "prompt-cache", "", "`file` that keeps the keys and values of the prompt: a later run whose prompt begins with the same tokens, of the same model, reads only the others; it is made if it is not there, and written when the prompt goes beyond it")
	f.BoolVar(&o.special, "special", false, "names of special tokens in texts, such as </s>, are these tokens; false: they are spelled out")
	f.IntVar(&o.tokens, "n", 128, "most `tokens` to add to a prompt, or to a line of -i")
	f.IntVar(&o.samples, "n-samples", 1, "`texts` to make of each prompt, which is read once if it is not short; they are drawn with -temperature, -top-k or -top-p, and are what a prompt that is given so many times would get")
	f.Var((*texts)(&o.stops), "stop", "`text` before which the output ends, where the name of a special token is that token, too; may be given several times")
	f.Float64Var(&o.sample.Temperature, "temperature", 0, "temperature `t` by which tokens are drawn: 0 takes the most likely token; 1 samples from the model's distribution, more from a flatter one; with -top-k or -top-p it is 1 if it is not given")
	f.IntVar(&o.sample.TopK, "top-k", 0, "sample from the `k` most likely tokens only; 0: all")
	f.Float64Var(&o.sample.TopP, "top-p", 1, "sample from the fewest most likely tokens that have probability `p`; 0 and 1: all")
	f.Uint64Var(&o.sample.Seed, "seed", 0, "`number` that chooses the random numbers; the same one gives the same text on the same kind of device")
	f.StringVar(&n.attention, "attn", "lean", "attention by `name`: lean; fixed or head, the same by FlashDecoding's schedule (every head's keys in 8 splits) or FlashAttention-2's (one worker a head); default (made of Gorgonia's own nodes; on a GPU the same in three launches), or fused (such nodes without a cache, rewritten)")
	f.StringVar(&n.linear, "linear", "lean", "linear layers by `name`: lean, or stock (Gorgonia's own nodes)")
	f.StringVar(&n.weights, "weights", "stored", "element `type` that the weights are rounded to and kept in: f32, f16, bf16, or stored, as the folder has them (-linear stock widens them to compute)")
	f.StringVar(&n.cache, "cache", "f32", "element `type` of lean's cache: f32, f16 or bf16")
	f.StringVar(&n.shard, "shard", "auto", "what each of several GPUs has of lean's cache: heads, some heads of all tokens; context, all heads of some tokens; auto, heads as far as they go evenly, and context for the rest")
	f.StringVar(&n.draft, "draft", "none", "guess tokens by `name`, and compute several at once: ngram looks up where the last tokens have stood before, in the prompt or behind it, and guesses what followed there; guesses that the model would not choose are dropped, so the text is the same, and sooner there where it repeats what was said; none guesses nothing")
	f.IntVar(&o.guesses, "draft-tokens", defaultGuesses, "most `tokens` to guess at once with -draft")
	f.IntVar(&o.workers, "workers", 0, "`workers` of lean's attention; 0: one a core")
	f.IntVar(&o.chunk, "chunk", 0, "most `tokens` of prompts that are computed at once; more are faster and take more memory: on a GPU for each token 80 KB of OPT-1.3b and 160 KB of OPT-6.7b or up to 25% more, on a CPU twice that; 0: 384 on the CPU, or 64 a core up to 1024, 2048 on a GPU, 128 with -perplexity")
	f.BoolVar(&o.mixed, "mixed", false, "what is multiplied with 16-bit weights and keys may be rounded to their type, as most software does; on a GPU prompts and steps of 17 sequences and more are faster, and on a CPU with AMX prompts; false: as exact as float32 is")
	f.StringVar(&n.device, "device", "cpu", "`cpu, gpu, gpu:N or gpu:N,M`: what computes; gpu is the first one, and needs an NVIDIA driver and nothing else; several share weights, cache and work")
	f.BoolVar(&o.stats, "stats", false, "write speed, the share of attention and the seed to standard error")
	f.BoolVar(&o.json, "json", false, "write one JSON document to standard output, at the end: texts, tokens, why each text ended, and what -stats tells")
	f.IntVar(&o.logprobs, "logprobs", 0, "with -json, the log-probability of each token, and of the `n` most likely ones in its place; 0: none")
	return f
}

// The flags of each use of the command, besides those of all uses.
var (
	forAll        = []string{"model", "attn", "linear", "weights", "cache", "shard", "workers", "chunk", "mixed", "device", "stats", "special"}
	forTexts      = []string{"prompt", "prompts", "n", "n-samples", "stop", "temperature", "top-k", "top-p", "seed", "json", "logprobs", "prompt-cache", "draft", "draft-tokens"}
	forPerplexity = []string{"perplexity", "stride", "json"}
	forSession    = []string{"i", "prompt", "n", "stop", "temperature", "top-k", "top-p", "seed", "draft", "draft-tokens"}
)

// parse parses the flags; -h writes the help to help. parse reads no file.
func parse(args []string, help io.Writer) (options, error) {
	var o options
	var n named
	f := newFlags(&o, &n)
	if err := f.Parse(args); errors.Is(err, flag.ErrHelp) {
		writeHelp(f, help)
		return o, errHelp
	} else if err != nil {
		return o, usagef("%v%s", err, near(f, err))
	}
	if f.NArg() > 0 {
		return o, usagef("%q is not a flag; texts are given by -prompt", f.Arg(0))
	}
	given := map[string]bool{}
	f.Visit(func(f *flag.Flag) { given[f.Name] = true })
	for _, check := range []func() error{
		func() error { return o.checkUse(given) },
		func() error { return o.look(n) },
		func() error { return o.checkCompute(n) },
		func() error { return o.checkDraft(given) },
		func() error { return o.checkSampling(given) },
		func() error { return o.checkRanks(given, n) },
	} {
		if err := check(); err != nil {
			return o, err
		}
	}
	o.flags = sameFlags(f)
	return o, nil
}

// checkUse checks the combination of given flags.
func (o *options) checkUse(given map[string]bool) error {
	use, flags := "texts to continue", forTexts
	switch {
	case given["perplexity"]:
		use, flags = "-perplexity", forPerplexity
	case o.interactive:
		use, flags = "-i", forSession
	}
	stdin := 0
	for _, s := range o.sources {
		if s.text == "-" {
			stdin++
		}
	}
	for _, name := range slices.Sorted(maps.Keys(given)) {
		if !slices.Contains(forAll, name) && !slices.Contains(flags, name) {
			return usagef("-%s has no meaning for %s", name, use)
		}
	}
	switch {
	case given["prompt-cache"] && o.promptCache == "":
		return usagef("-prompt-cache needs a file")
	case given["perplexity"] && o.perplexity == "":
		return usagef("-perplexity needs a file")
	case o.stride < 0:
		return usagef("-stride %d is negative", o.stride)
	case use == "texts to continue" && len(o.sources) == 0:
		return usagef("no -prompt, no -prompts, no -perplexity and no -i")
	case stdin > 1:
		return usagef("- is given %d times, and standard input can be read once", stdin)
	case o.interactive && stdin > 0:
		return usagef("-i reads its lines from standard input, so -prompt - can't")
	case o.interactive && len(o.sources) > 1:
		return usagef("-i has one text, and %d are given by -prompt", len(o.sources))
	case o.tokens < 1:
		return usagef("-n %d is less than 1", o.tokens)
	case o.logprobs < 0 || o.logprobs > mostLogprobs:
		return usagef("-logprobs %d is outside [0, %d]", o.logprobs, mostLogprobs)
	case o.logprobs > 0 && !o.json:
		return usagef("-logprobs needs -json, which has a place for them")
	}
	return nil
}

// look looks names up.
func (o *options) look(n named) (err error) {
	var known bool
	if o.attention, o.schedule, known = model.AttentionNamed(n.attention); !known {
		return usagef("-attn %q is none of lean, fixed, head, default, fused", n.attention)
	}
	if o.linear, err = linears.find("linear", n.linear); err != nil {
		return err
	}
	if o.weights, err = weightTypes.find("weights", n.weights); err != nil {
		return err
	}
	o.weightsName = n.weights
	if o.cache, err = elementTypes.find("cache", n.cache); err != nil {
		return err
	}
	if o.shard, err = shards.find("shard", n.shard); err != nil {
		return err
	}
	if o.draft, err = drafts.find("draft", n.draft); err != nil {
		return err
	}
	switch numbers, numbered := strings.CutPrefix(n.device, "gpu:"); {
	case n.device == "cpu":
	case n.device == "gpu":
		o.gpus, o.anyGPU = []int{0}, true
	case numbered:
		for _, number := range strings.Split(numbers, ",") {
			i, err := strconv.Atoi(number)
			if err != nil || i < 0 {
				return usagef("-device %q: %q is no number of a GPU", n.device, number)
			}
			if slices.Contains(o.gpus, i) {
				return usagef("-device %q has GPU %d twice", n.device, i)
			}
			o.gpus = append(o.gpus, i)
		}
	default:
		return usagef("-device %q is none of cpu, gpu, gpu:N, gpu:N,M", n.device)
	}
	return nil
}

// checkCompute checks the flags of the computation.
func (o *options) checkCompute(n named) error {
	switch {
	case o.onGPU() && (o.attention == model.Fused || o.linear != model.LeanLinear):
		return usagef("-device %s has neither -attn fused nor -linear stock: Gorgonia's own nodes have no GPU here", n.device)
	case o.shard != la.ShardAuto && len(o.gpus) < 2:
		return usagef("-shard %s needs several GPUs, as -device gpu:0,1", n.shard)
	case o.shard == la.ShardContext && o.attention != model.Lean:
		return usagef("-shard %s needs -attn lean, fixed or head", n.shard)
	case o.chunk < 0 || o.chunk > maxChunk:
		return usagef("-chunk %d is outside [0, %d]", o.chunk, maxChunk)
	case o.chunk > 0 && o.attention == model.Fused:
		return usagef("-chunk needs a cache: -attn fused computes all tokens at once")
	case o.mixed && o.linear != model.LeanLinear:
		return usagef("-mixed needs -linear lean")
	case o.workers < 0 || o.workers > maxWorkers:
		return usagef("-workers %d is outside [0, %d]", o.workers, maxWorkers)
	case !o.paged() && o.cache != tensor.Float32:
		return usagef("-cache %s needs -attn lean: Gorgonia computes nothing in that type", n.cache)
	case o.attention != model.Lean && o.workers != 0:
		return usagef("-workers needs -attn lean")
	case !o.paged() && o.promptCache != "":
		return usagef("-prompt-cache needs -attn lean, fixed or head: Gorgonia's own nodes have no cache that could be saved")
	case !o.paged() && o.interactive:
		return usagef("-i needs -attn lean, fixed or head: Gorgonia's own nodes have no cache that could be forked")
	}
	return nil
}

// checkRanks reads whether this is one of several processes, and checks for unsupported flags.
func (o *options) checkRanks(given map[string]bool, n named) (err error) {
	if o.world, err = ranks.Environment(); err != nil {
		return usagef("%v", err)
	}
	several := fmt.Sprintf("WORLD_SIZE %d", o.world.Size)
	switch {
	case o.world.Size == 1:
		return nil
	case !o.onGPU():
		return usagef("-device %s with %s: ranks compute on GPUs, which -device gpu names", n.device, several)
	case o.interactive:
		return usagef("-i with %s: a session has one process", several)
	case o.promptCache != "":
		return usagef("-prompt-cache with %s: each rank has a part of the cache alone", several)
	case o.sample.Temperature != 0 && !given["seed"] && o.perplexity == "":
		return usagef("tokens are drawn, with %s: -seed is needed, the same on all ranks", several)
	case o.perplexity == "-" || slices.ContainsFunc(o.sources, func(s source) bool { return s.text == "-" }):
		return usagef("standard input with %s: all ranks need the text, from -prompt or a file", several)
	}
	return nil
}

// checkDraft checks the flags of drafts.
func (o *options) checkDraft(given map[string]bool) error {
	switch {
	case o.guesses < 1 || o.guesses > model.MostDraft:
		return usagef("-draft-tokens %d is outside [1, %d]", o.guesses, model.MostDraft)
	case given["draft-tokens"] && !o.draft:
		return usagef("-draft-tokens needs -draft ngram")
	case o.draft && o.attention == model.Fused:
		return usagef("-draft needs a cache: -attn fused computes all tokens at once")
	}
	return nil
}

// draftTokens returns the most tokens of a draft; 0: no drafts.
func (o *options) draftTokens() int {
	if !o.draft {
		return 0
	}
	return o.guesses
}

// paged reports whether keys and values are in a paged cache.
func (o *options) paged() bool {
	return o.attention == model.Lean || o.attention == model.Default && o.onGPU()
}

// onGPU reports whether a GPU computes.
func (o *options) onGPU() bool { return len(o.gpus) > 0 }

// checkSampling checks how tokens are chosen, and sets defaults.
func (o *options) checkSampling(given map[string]bool) error {
	c := &o.sample
	if err := c.Validate(); err != nil {
		return usagef("%v", err)
	}
	if c.TopP == 0 {
		c.TopP = 1
	}
	if c.TopK > 0 || c.TopP < 1 {
		switch {
		case !given["temperature"]:
			c.Temperature = 1
		case c.Temperature == 0:
			return usagef("-temperature 0 takes the most likely token: it leaves nothing to -top-k and -top-p")
		}
	}
	switch {
	case o.samples < 1 || o.samples > maxSamples:
		return usagef("-n-samples %d is outside [1, %d]", o.samples, maxSamples)
	case o.samples > 1 && c.Temperature == 0:
		return usagef("-n-samples %d with -temperature 0: the most likely tokens make one text", o.samples)
	}
	if !given["seed"] && c.Temperature > 0 {
		c.Seed = uint64(rand.Uint32()) // short enough to type again
	}
	return nil
}

const (
	maxWorkers   = 1 << 12 // the limit of leanattention
	maxChunk     = 1 << 20
	maxSamples   = 1 << 12
	mostLogprobs = 1000

	// The fastest of 2 to 32 on two cores, on texts with much and with little repetition.
	defaultGuesses = 8
)
