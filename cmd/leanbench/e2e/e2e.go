// Package e2e measures whole decoders against other programs: OPT on cores, and OPT and Llama on a GPU.
package e2e

import (
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"gorgonia.org/leanattention/cmd/leanbench/command"
	"gorgonia.org/leanattention/cmd/leanbench/gpu"
	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// Commands lists the commands of this package.
var Commands = []command.Command{
	{Name: "e2e", Summary: "decoding with an OPT model, against transformers and CTranslate2; on a GPU, of Llama's shapes, too, against transformers", Setup: measureDecoders},
	{Name: "scale", Summary: "attention, linear layers and a whole model on several GPUs, against one", Setup: gpu.Scale(scaleModels)},
	{Name: "rank", Summary: "one of the processes that scale -ranks starts: it answers questions", Setup: rankCommand},
	{Name: "tpla", Summary: "the error of latent attention in parts, with a trained model", Setup: measureTPLA},
	{Name: "checkpoint", Summary: "write an OPT model with random weights", Setup: makeCheckpoint},
}

//go:embed opt.py
var optWorker string

// openMPSettle is longer than the 200 ms for which CTranslate2's idle OpenMP threads spin.
const openMPSettle = 300 * time.Millisecond

// engine is a program that decodes with a model.
type engine interface {
	// decode reads batch prompts of context tokens each, unless the previous call read the same prompts. It
	// then decodes steps tokens per sequence greedily. prompt is the time to the first token when the prompts
	// were last read, and steady is the time of the steps. ids are the tokens of the first sequence: the
	// first token, and one token per step.
	decode(batch, context, steps int) (prompt, steady time.Duration, ids []string, err error)
	close() error
}

// entrant is an engine of the table before it is loaded.
type entrant struct {
	name  string
	open  func() (engine, error)
	other bool // runs in another process
	exact bool // computes the same as all other exact entrants, within rounding
}

// measureDecoders measures a whole decoder against other programs.
func measureDecoders(flags *flag.FlagSet) func(stdout, stderr io.Writer) error {
	o := measure.Flags(flags)
	python := flags.String("python", "", "`path` of a python that has transformers and CTranslate2; peers/setup.sh makes one and prints it")
	dir := flags.String("dir", "", "`folder` for the checkpoints; those that are there already are used again (default: in the user's cache folder)")
	device := flags.String("device", "cpu", "`where` to decode: cpu, or gpu, against transformers on the same GPU; it needs no checkpoints")
	threads := flags.String("threads", "", "with -device cpu: measure prompts and steps of a model with random weights instead, that of -shapes or OPT-1.3b, with these `numbers` of threads, such as 8,16; -prompts says which prompts, and -batches which steps")
	onGPU := e2eGPUFlags(flags)
	return func(stdout, stderr io.Writer) error {
		if *threads != "" {
			return measureCores(flags, o, *python, *device, *threads, stdout, stderr)
		}
		if *device == "gpu" {
			onGPU.json, onGPU.quick, onGPU.python = o.JSON, o.Quick, *python
			return onGPU.run(stdout, stderr)
		} else if *device != "cpu" {
			return fmt.Errorf("-device %q is neither cpu nor gpu", *device)
		}
		if *python == "" {
			return errors.New("-python is needed: peers/setup.sh makes one and prints its path")
		}
		if *dir == "" {
			cache, err := os.UserCacheDir()
			if err != nil {
				return err
			}
			*dir = filepath.Join(cache, "leanattention", "e2e")
		}
		m, err := measure.ThisMachine(o.Workers)
		if err != nil {
			return err
		}
		r := &measure.Report{Command: "e2e", Machine: m, Figures: []measure.Figure{}}
		b := &e2e{report: r, json: o.JSON, quick: o.Quick, python: *python, dir: *dir, stdout: stdout, stderr: stderr}
		if err := b.checkpoints(); err != nil {
			return err
		}
		return b.run()
	}
}

type e2e struct {
	report         *measure.Report
	json           string // file for the report, saved after each table
	quick          bool
	python, dir    string
	stdout, stderr io.Writer
}

// checkpoints writes the missing checkpoints.
func (b *e2e) checkpoints() error {
	for _, s := range measure.Storages {
		dir := b.checkpoint(s)
		if _, err := os.Stat(filepath.Join(dir, "config.json")); err == nil {
			continue
		}
		fmt.Fprintf(b.stderr, "making a checkpoint of OPT-125m's shape in %s\n", s.Name)
		if err := writeCheckpoint(dir, optShapes["125m"], s, 0); err != nil {
			return err
		}
	}
	return nil
}

func (b *e2e) checkpoint(s measure.Storage) string { return filepath.Join(b.dir, "opt-125m-"+s.Name) }

const (
	nameLean    = "lean, f32 weights"
	nameHalf    = "lean, f16 weights"
	nameBrain   = "lean, bf16 weights"
	nameHF      = "transformers f32"
	nameCT2     = "CTranslate2 f32"
	nameCT2Int8 = "CTranslate2 int8"
)

func (b *e2e) entrants() []entrant {
	ours := func(name string, s measure.Storage) entrant {
		return entrant{name: name, exact: s == measure.StoreF32, open: func() (engine, error) { return openLean(b.checkpoint(s), s) }}
	}
	theirs := func(name, kind string, args ...string) entrant {
		return entrant{name: name, other: true, exact: name != nameCT2Int8, open: func() (engine, error) {
			args := append([]string{fmt.Sprint(b.report.Machine.Workers), kind, b.checkpoint(measure.StoreF32)}, args...)
			w, err := measure.StartWorker(b.python, optWorker, args...)
			if err != nil {
				return nil, err
			}
			b.report.Notes = append(b.report.Notes, strings.Join(w.Hello, " "))
			return &workerEngine{w}, nil
		}}
	}
	converted := filepath.Join(b.dir, "opt-125m-ct2")
	return []entrant{
		ours(nameLean, measure.StoreF32),
		ours(nameHalf, measure.StoreF16),
		ours(nameBrain, measure.StoreBF16),
		theirs(nameHF, "transformers"),
		theirs(nameCT2, "ctranslate2", converted, "float32"),
		theirs(nameCT2Int8, "ctranslate2", converted, "int8"),
	}
}

// decoding is a table: a batch of sequences with equal contexts.
type decoding struct {
	table                         string
	batch, context, steps, rounds int
	warm                          bool                                       // follows another table
	bars                          map[string]map[measure.Metric]*measure.Bar // keyed by contender
}

func (b *e2e) decodings() []decoding {
	one := decoding{
		table: "One sequence, behind 64 tokens", batch: 1, context: 64, steps: 64, rounds: 9,
		bars: map[string]map[measure.Metric]*measure.Bar{
			nameLean: {measure.OverCT2: measure.AtLeast(1.25)},
			nameHalf: {measure.OverHF: measure.AtLeast(2), measure.OverInt8: measure.AtLeast(1)},
		},
	}
	eight := decoding{
		table: "8 sequences, behind 1024 tokens each", batch: 8, context: 1024, steps: 24, rounds: 3, warm: true,
		bars: map[string]map[measure.Metric]*measure.Bar{nameLean: {measure.OverCT2: measure.AtLeast(1.2)}},
	}
	if b.quick {
		one.rounds, one.steps, eight.rounds, eight.steps = 3, 16, 1, 8
	}
	return []decoding{one, eight}
}

func (b *e2e) run() (err error) {
	var entrants []entrant
	var engines []engine
	defer func() {
		for _, e := range engines {
			err = errors.Join(err, e.close())
		}
	}()
	for _, e := range b.entrants() {
		fmt.Fprintf(b.stderr, "loading %s\n", e.name)
		engine, err := e.open()
		if err != nil {
			return fmt.Errorf("%s: %w", e.name, err)
		}
		entrants, engines = append(entrants, e), append(engines, engine)
	}
	b.report.WriteHead(b.stdout)
	for _, d := range b.decodings() {
		if err := b.measure(d, entrants, engines); err != nil {
			return fmt.Errorf("%s: %w", d.table, err)
		}
		if err := b.report.Save(b.json); err != nil {
			return err
		}
		b.report.WriteTable(b.stdout, d.table)
	}
	b.report.WriteVerdict(b.stdout)
	return nil
}

func (b *e2e) measure(d decoding, entrants []entrant, engines []engine) error {
	contenders, prompts, ids := make([]measure.Contender, len(entrants)), make([]measure.Samples, len(entrants)), make([][]string, len(entrants))
	for i, e := range entrants {
		contenders[i] = measure.Contender{Name: e.name, Run: func(steps int) (time.Duration, error) {
			fmt.Fprintf(b.stderr, "%s: %s\n", d.table, e.name)
			prompt, steady, chosen, err := engines[i].decode(d.batch, d.context, steps)
			if err != nil {
				return 0, err
			}
			prompts[i], ids[i] = append(prompts[i], prompt.Seconds()), chosen
			return steady, nil
		}}
		if e.other {
			contenders[i].Settle = openMPSettle
		}
	}
	all, err := measure.Alternate(measure.Pace{Rounds: d.rounds, Steps: d.steps, Warm: d.warm}, contenders)
	if err != nil {
		return err
	}
	if err := sameText(entrants, ids); err != nil {
		return err
	}
	names := map[measure.Metric]int{}
	for i, e := range entrants {
		switch e.name {
		case nameHF:
			names[measure.OverHF] = i
		case nameCT2:
			names[measure.OverCT2] = i
		case nameCT2Int8:
			names[measure.OverInt8] = i
		}
	}
	for i, e := range entrants {
		r := b.report.Row(d.table, "", e.name)
		r.Add(measure.Tokens, float64(d.batch)/all[i].Median(), nil)
		r.Add(measure.BestTokens, float64(d.batch)/all[i].Best(), nil)
		r.Add(measure.Prompt, float64(d.batch*d.context)/prompts[i].Median(), nil)
		for _, m := range []measure.Metric{measure.OverHF, measure.OverCT2, measure.OverInt8} {
			r.Add(m, all[i].Faster(all[names[m]]), d.bars[e.name][m])
		}
	}
	return nil
}

// sameText compares the tokens of the exact entrants, because a speed counts only if the result is right.
// Rounding may decide between two almost equally likely tokens, and all later tokens then differ. So at least
// the first quarter of the tokens must be equal.
func sameText(entrants []entrant, ids [][]string) error {
	first := slices.IndexFunc(entrants, func(e entrant) bool { return e.exact })
	for i, e := range entrants {
		if !e.exact {
			continue
		}
		same := 0
		for same < len(ids[first]) && same < len(ids[i]) && ids[i][same] == ids[first][same] {
			same++
		}
		if len(ids[i]) != len(ids[first]) || 4*same < len(ids[first]) {
			return fmt.Errorf("the tokens of %s (%s) and %s (%s) are the same only up to number %d",
				e.name, strings.Join(ids[i], " "), entrants[first].name, strings.Join(ids[first], " "), same)
		}
	}
	return nil
}

// workerEngine is an engine in another process.
type workerEngine struct{ w *measure.Worker }

func (e *workerEngine) decode(batch, context, steps int) (prompt, steady time.Duration, ids []string, err error) {
	times, ids, err := e.w.Seconds(2, "decode %d %d %d", batch, context, steps)
	if err != nil {
		return 0, 0, nil, err
	}
	return times[0], times[1], ids, nil
}

func (e *workerEngine) close() error { return e.w.Close() }
