package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/examples/opt/tiny"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/ranks"

	"gorgonia.org/tensor"
)

// flags are the flags of a command. A flag has one help text and any number of names.
type flags struct {
	*flag.FlagSet
	about   string
	aliases map[string][]string // by the first name
}

func newFlags(command, about string) *flags {
	f := &flags{flag.NewFlagSet("leanlm "+command, flag.ContinueOnError), about, map[string][]string{}}
	f.SetOutput(io.Discard) // parse reports errors
	return f
}

// add adds a flag by its names, the first of which is in the help.
func (f *flags) add(names, usage string, define func(name, usage string)) {
	all := strings.Split(names, ",")
	for _, name := range all {
		define(name, usage)
	}
	f.aliases[all[0]] = all[1:]
}

func (f *flags) text(to *string, names, otherwise, usage string) {
	f.add(names, usage, func(name, usage string) { f.StringVar(to, name, otherwise, usage) })
}

func (f *flags) integer(to *int, names string, otherwise int, usage string) {
	f.add(names, usage, func(name, usage string) { f.IntVar(to, name, otherwise, usage) })
}

func (f *flags) number(to *float64, names string, otherwise float64, usage string) {
	f.add(names, usage, func(name, usage string) { f.Float64Var(to, name, otherwise, usage) })
}

func (f *flags) is(to *bool, names, usage string) {
	f.add(names, usage, func(name, usage string) { f.BoolVar(to, name, false, usage) })
}

func (f *flags) each(names, usage string, set func(string) error) {
	value := &eachValue{set: set}
	f.add(names, usage, func(name, usage string) { f.Var(value, name, usage) })
}

// eachValue calls set with each value of a flag.
type eachValue struct {
	set func(string) error
	all []string
}

func (e *eachValue) String() string { return strings.Join(e.all, " ") }

func (e *eachValue) Set(s string) error {
	e.all = append(e.all, s)
	return e.set(s)
}

// stops adds the flag of texts that end a continuation.
func (f *flags) stops(to *[]string) {
	f.each("r,reverse-prompt,stop", "`text` that ends a continuation, and is not a part of it; may be given several times", func(s string) error {
		switch {
		case s == "":
			return errors.New("it is empty")
		case !utf8.ValidString(s):
			return errors.New("it is not UTF-8, and texts are")
		}
		*to = append(*to, s)
		return nil
	})
}

// parse parses the arguments. -h writes the help.
func (f *flags) parse(args []string, std streams) error {
	err := f.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprintf(std.out, "Usage: %s [flags]\n\n%s\n\n", f.Name(), f.about)
		f.help(std.out)
		return err
	case err != nil:
		return usagef("%v%s", err, near(f.FlagSet, err))
	case f.NArg() > 0:
		return usagef("%q is no flag; a text is given with -p", f.Arg(0))
	}
	f.Visit(func(x *flag.Flag) {
		if x.Value.String() == "" && slices.Contains([]string{"prompt-cache", "tools", "api-key-file", "ssl-cert-file", "ssl-key-file"}, x.Name) {
			err = usagef("-%s needs a file", x.Name)
		}
	})
	return err
}

func (f *flags) help(w io.Writer) {
	f.VisitAll(func(x *flag.Flag) {
		others, first := f.aliases[x.Name]
		if !first {
			return
		}
		value, usage := flag.UnquoteUsage(x)
		line := "  -" + strings.Join(append([]string{x.Name}, others...), ", -")
		if value != "" {
			line += " " + value
		}
		if d := x.DefValue; d != "" && d != "0" && d != "false" {
			usage += " (default " + d + ")"
		}
		fmt.Fprintf(w, "%s\n        %s\n", line, usage)
	})
}

// choice is a flag with some values.
func choice[T any](f *flags, to *T, names, usage string, known map[string]T) {
	words := make([]string, 0, len(known))
	for word := range known {
		words = append(words, word)
	}
	slices.Sort(words)
	f.each(names, usage+": "+strings.Join(words, ", "), func(s string) error {
		value, ok := known[s]
		if !ok {
			return fmt.Errorf("none of %s", strings.Join(words, ", "))
		}
		*to = value
		return nil
	})
}

// modelFlags say which model a command opens, and how an engine computes.
type modelFlags struct {
	path    string
	lora    []string
	device  string
	options decoder.Options
	loading time.Duration // time to make the engine
}

func (m *modelFlags) add(f *flags) {
	types := map[string]tensor.Dtype{"f32": tensor.Float32, "f16": la.Float16, "bf16": la.BFloat16}
	f.text(&m.path, "m,model", "", "`file or folder` of the model: a GGUF file, or a Hugging Face folder; without it, a small model that is part of the program")
	f.each("lora", "`folder or file` of a LoRA adapter that is merged into the weights: a folder of peft, or a GGUF file; may be given several times", func(s string) error {
		if s == "" {
			return errors.New("it is empty")
		}
		m.lora = append(m.lora, s)
		return nil
	})
	f.integer(&m.options.Context, "c,ctx-size,context", 0, "most `tokens` of a text; 0: the model's, but at most 4096")
	f.integer(&m.options.Tokens, "cache-tokens", 0, "capacity of the cache in `tokens`, of all texts together; 0: enough for -c")
	f.integer(&m.options.Batch, "np,parallel,batch", 0, "most `texts` that are computed at a time; 0: 16")
	f.integer(&m.options.Chunk, "ub,ubatch-size,b,batch-size,chunk", 0, "most `tokens` of a step; 0: 384, or 64 a processor but at most 1024; 2048 on a GPU")
	f.integer(&m.options.Workers, "t,threads,workers", 0, "`threads` of attention; 0: as many as the processors")
	f.is(&m.options.Exact, "exact", "compute products with weights of 16 bits and fewer in float32; otherwise activations are rounded to 16 bits, or to 8 for weights of 8 and 4 bits, which is faster, as in most programs")
	f.is(&m.options.QuantisedRows, "quantised-rows", "with matrices of int8 or fp8: round activations of prompts to 8 bits by row, which is faster on GPUs of compute capability 9.0, and less accurate")
	matrices := maps.Clone(types)
	matrices["int8"] = tensor.Int8
	cached := maps.Clone(matrices)
	matrices["fp8"], matrices["int4"] = la.E4M3, nn.Int4
	choice(f, &m.options.Weights, "weights", "element `type` of matrices; as stored if it is not given; int8, fp8 and int4 round them", matrices)
	cached["e4m3"], cached["q4"] = la.E4M3, la.Q4
	choice(f, &m.options.Cache, "ctk,cache-type-k,cache-type-v,ctv,cache", "element `type` of keys and values; f32 if it is not given", cached)
	f.integer(&m.options.EdgeLayers, "edge-layers", 0, "with -ctk e4m3, int8 or q4: first `layers`, and last layers, whose keys and values have 16 bits")
	f.text(&m.device, "device,dev", "cpu", "`device` that computes: cpu, gpu, gpu:1 for the GPU with that number, or gpu:0,1 for several, which share weights, cache and work")
	choice(f, &m.options.Shard, "shard", "how several GPUs share the cache; auto if it is not given", map[string]la.Shard{"auto": la.ShardAuto, "heads": la.ShardHeads, "context": la.ShardContext})
}

// opened is an open model with the devices and ranks that compute.
type opened struct {
	*decoder.Model
	gpu   *device.GPU // nil: the CPU
	world ranks.World
	comm  *ranks.Comm // nil: this process alone
	stop  func() bool // of what tells the other ranks of an interrupt

	restore func() // of settings of the process; nil: no engine was made
}

// Close closes the model and the devices. Ranks wait for each other.
func (o *opened) Close() error {
	if o.restore != nil {
		o.restore()
	}
	err := o.Model.Close()
	if o.comm != nil {
		o.stop()
		err = errors.Join(err, o.comm.Close())
	}
	if o.gpu != nil {
		err = errors.Join(err, o.gpu.Close())
	}
	return err
}

// open opens the devices, and then the model.
func (m *modelFlags) open() (*opened, error) {
	world, err := ranks.Environment()
	if err != nil {
		return nil, err
	}
	gpu, err := m.openDevice(world)
	if err != nil {
		return nil, err
	}
	m.options.Device = gpu
	var model *decoder.Model
	if m.path == "" {
		model, err = decoder.OpenFS("the shipped model", tiny.Files)
	} else {
		if model, err = decoder.Open(m.path); err != nil {
			err = explain(m.path, err)
		}
	}
	for _, path := range m.lora {
		if err == nil {
			if err = model.Adapt(path); err != nil {
				err = errors.Join(err, model.Close())
			}
		}
	}
	if err != nil {
		if gpu != nil {
			err = errors.Join(err, gpu.Close())
		}
		return nil, err
	}
	return &opened{Model: model, gpu: gpu, world: world}, nil
}

// engine makes an engine of a model, and reports how the loading goes on.
func (m *modelFlags) engine(model *opened, std streams) (*decoder.Engine, error) {
	began := time.Now()
	name := m.path
	if name == "" {
		name = "the shipped model"
	}
	live := isTerminal(std.err)
	o := m.options
	o.Progress = func(done, all int) {
		if live && done%10 == 0 {
			fmt.Fprintf(std.err, "\rloading %s: %d of %d weights", printable(name), done, all)
		}
	}
	engine, err := model.Engine(o)
	if err != nil {
		if live {
			fmt.Fprintln(std.err)
		}
		return nil, err
	}
	if live {
		fmt.Fprint(std.err, "\r\x1b[K")
	}
	model.restore = limitGarbage()
	m.loading = time.Since(began)
	fmt.Fprintf(std.err, "loaded %s in %.2f s: texts of at most %d tokens\n", printable(name), m.loading.Seconds(), engine.Options().Context)
	return engine, nil
}

// hint adds to an error of a text the flag that may help.
func (m *modelFlags) hint(err error) error {
	if errors.Is(err, decoder.ErrLogits) && m.options.Cache == la.Float16 {
		return fmt.Errorf("%w: keys or values may be larger than float16 has; -ctk bf16 has larger ones", err)
	}
	return err
}

// isTerminal reports whether a stream is a terminal.
func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}
