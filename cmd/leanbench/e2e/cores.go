package e2e

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"time"

	"gorgonia.org/leanattention/cmd/leanbench/measure"

	la "gorgonia.org/leanattention"
	lean "gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/internal/cpu"

	"gorgonia.org/tensor"
)

// coresOptions are the options of the e2e command on cores with -threads. It measures models with random
// weights and no checkpoints.
type coresOptions struct {
	*measure.Options
	python, shape             string
	threads, prompts, batches string
}

const (
	coresShape   = "1.3b"
	coresPrompts = "1x401,1x2000"
	quickPrompts = "1x401"
)

// coreSteps lists the measured steps as {batch, tokens per sequence before the steps}.
var coreSteps = [][2]int{{1, 401}, {8, 1024}}

// coreWay is a configuration of leanattention: the element type of weights and cache, and whether products
// may be in mixed precision.
type coreWay struct {
	name  string
	store measure.Storage
	mixed bool
}

var coreWays = []coreWay{
	{"lean f32", measure.StoreF32, false},
	{"lean f16", measure.StoreF16, false},
	{"lean f16, mixed precision", measure.StoreF16, true},
	{"lean bf16", measure.StoreBF16, false},
	{"lean bf16, mixed precision", measure.StoreBF16, true},
}

// corePeers lists transformers per compute type.
var corePeers = []struct {
	name, dtype string
	over        measure.Metric
}{
	{"transformers f32", "float32", measure.OverHF},
	{"transformers bf16", "bfloat16", measure.OverHF16},
}

// onCores measures models with several numbers of threads.
type onCores struct {
	report         *measure.Report
	json           string // file for the report, saved after each case
	rounds, steps  int
	batches        [][2]int // in the form of coreSteps
	stdout, stderr io.Writer
	network        lean.Network
	weights        lean.Weights
	workers        []*measure.Worker // one per entry of corePeers; nil: no peers
	memory         []byte            // memory that the ceiling reads
}

// ceilingBytes is the size of the memory that the ceiling reads, many times the size of any cache.
var ceilingBytes = 1 << 30

// startCoresWorker starts the transformers worker. Tests replace it.
var startCoresWorker = func(python string) (*measure.Worker, error) {
	return measure.StartWorker(python, decoderWorker, "cpu")
}

// measureCores is measureDecoders with -threads. It rejects flags that do not apply.
func measureCores(flags *flag.FlagSet, o *measure.Options, python, device, threads string, stdout, stderr io.Writer) (err error) {
	c := &coresOptions{Options: o, python: python, shape: coresShape, threads: threads, prompts: coresPrompts}
	if o.Quick {
		c.prompts = quickPrompts
	}
	flags.Visit(func(f *flag.Flag) {
		switch f.Name {
		case "threads", "python", "json", "quick":
		case "shapes":
			c.shape = f.Value.String()
		case "prompts":
			c.prompts = f.Value.String()
		case "batches":
			c.batches = f.Value.String()
		case "device":
			if device != "cpu" {
				err = errors.Join(err, fmt.Errorf("-threads measures a CPU, and -device is %q", device))
			}
		default:
			err = errors.Join(err, fmt.Errorf("-%s says nothing with -threads", f.Name))
		}
	})
	if err != nil {
		return err
	}
	return c.run(stdout, stderr)
}

func (o *coresOptions) run(stdout, stderr io.Writer) (err error) {
	threads, err := measure.Counts("threads", o.threads)
	if err == nil && len(threads) == 0 {
		err = fmt.Errorf("-threads %q has no number", o.threads)
	}
	if err != nil {
		return err
	}
	if _, ok := optShapes[o.shape]; !ok {
		return fmt.Errorf("-shapes: %q is none of OPT's, of which -threads measures one", o.shape)
	}
	prompts, err := (&e2eGPUOptions{shapes: o.shape, prompts: o.prompts}).promptCases()
	if err != nil {
		return err
	}
	shape := optShapes[o.shape]
	if len(prompts) > 0 {
		shape = prompts[0].shape // the shape with positions for the longest prompt
	}
	steps := coreSteps
	if o.Quick {
		steps = steps[:1]
	}
	batches, err := measure.Counts("batches", o.batches)
	if err != nil {
		return err
	}
	if len(batches) > 0 {
		steps = nil
	}
	for _, n := range batches {
		steps = append(steps, [2]int{n, coreSteps[min(n, 2)-1][1]})
	}
	m, err := measure.ThisMachine(slices.Max(threads))
	if err != nil {
		return err
	}
	b := &onCores{
		report: &measure.Report{Command: "e2e -threads", Machine: m, Figures: []measure.Figure{}}, json: o.JSON,
		rounds: 5, steps: 32, batches: steps, stdout: stdout, stderr: stderr,
	}
	if o.Quick {
		b.rounds, b.steps = 2, 8
	}
	if err := b.open(shape, o.python); err != nil {
		return errors.Join(err, b.close())
	}
	defer func() { err = errors.Join(err, b.close()) }()
	b.report.WriteHead(b.stdout)
	return b.measure(shape, threads, prompts)
}

// open creates the weights in each element type, and starts the peers.
func (b *onCores) open(shape shape, python string) error {
	var err error
	if b.network, err = shape.network(); err != nil {
		return err
	}
	fmt.Fprintf(b.stderr, "making weights\n")
	b.weights = ownWeights{newRandomWeights(b.network)}
	b.memory = make([]byte, ceilingBytes)
	rng := rand.NewChaCha8([32]byte{1})
	if _, err := rng.Read(b.memory); err != nil {
		return err
	}
	if python == "" {
		b.report.Notes = append(b.report.Notes, "transformers is left out: no -python")
		return nil
	}
	for _, p := range corePeers {
		w, err := startCoresWorker(python)
		if err != nil {
			return err
		}
		b.workers = append(b.workers, w)
		fmt.Fprintf(b.stderr, "%s: making weights\n", p.name)
		if err := makeTheirs(w, shape, p.dtype); err != nil {
			return err
		}
	}
	b.report.Notes = append(b.report.Notes, strings.Join(b.workers[0].Hello, " "))
	return nil
}

func (b *onCores) close() (err error) {
	for _, w := range b.workers {
		err = errors.Join(err, w.Close())
	}
	return err
}

func (b *onCores) measure(shape shape, threads []int, prompts []promptCase) error {
	for _, n := range threads {
		runtime.GOMAXPROCS(n)
		for _, w := range b.workers {
			if _, err := w.Ask("threads %d", n); err != nil {
				return err
			}
		}
		table := fmt.Sprintf("Prompts of %v, %d threads", shape, n)
		for _, p := range prompts {
			if err := b.prompt(table, p); err != nil {
				return fmt.Errorf("%d threads, %v: %w", n, p, err)
			}
			if err := b.report.Save(b.json); err != nil {
				return err
			}
		}
		b.report.WriteTable(b.stdout, table)
		table = fmt.Sprintf("Steps of %v, %d threads", shape, n)
		for _, s := range b.batches {
			if err := b.step(table, stepCase{shape: shape, batch: s[0], context: s[1], steps: b.steps}); err != nil {
				return fmt.Errorf("%d threads, %d sequences: %w", n, s[0], err)
			}
			if err := b.report.Save(b.json); err != nil {
				return err
			}
		}
		b.report.WriteTable(b.stdout, table)
	}
	b.report.WriteVerdict(b.stdout)
	return nil
}

// engine returns an engine of the configuration.
func (b *onCores) engine(w coreWay) *leanEngine {
	return newRandom(b.network, b.weights, lean.Options{Weights: w.store.Dtype, Cache: w.store.Dtype, Exact: !w.mixed})
}

// peer returns a contender that asks worker i.
func (b *onCores) peer(i int, question string, args ...any) measure.Contender {
	steps := b.workers[i].Steps(question, args...)
	return measure.Contender{Name: corePeers[i].name, Settle: measure.TorchSettle, Run: func(n int) (time.Duration, error) {
		fmt.Fprintf(b.stderr, "%s\n", corePeers[i].name)
		return steps(n)
	}}
}

func (b *onCores) prompt(table string, c promptCase) (err error) {
	var contenders []measure.Contender
	for _, way := range coreWays {
		r := leanPrompts{b.engine(way)}
		defer func() { err = errors.Join(err, r.close()) }()
		contenders = append(contenders, measure.Contender{Name: way.name, Run: func(steps int) (total time.Duration, err error) {
			fmt.Fprintf(b.stderr, "%s: %v: %s\n", table, c, way.name)
			for range steps {
				t, err := r.read(c.batch, c.width)
				if err != nil {
					return 0, err
				}
				total += t
			}
			return total, nil
		}})
	}
	for i := range b.workers {
		peer := b.peer(i, "prompt %d %d", c.batch, c.width)
		contenders = append(contenders, peer)
	}
	all, err := measure.Alternate(measure.Pace{Rounds: b.rounds, Steps: 1}, contenders)
	if err != nil {
		return err
	}
	bars := map[string]map[measure.Metric]*measure.Bar{
		"lean f32":                   {measure.OverHF: measure.AtLeast(1.1)},
		"lean bf16, mixed precision": {measure.OverHF16: measure.AtLeast(0.9)},
	}
	for i, t := range all {
		r := b.report.Row(table, c.String(), contenders[i].Name)
		r.Add(measure.Prompt, float64(c.batch*c.width)/t.Median(), nil)
		b.over(r, contenders[i].Name, t, all, bars)
	}
	return nil
}

// over adds the speedups of contender name over the peers, if name is one of leanattention's. The peers are
// the last entries of all.
func (b *onCores) over(r measure.Row, name string, t measure.Samples, all []measure.Samples, bars map[string]map[measure.Metric]*measure.Bar) {
	if !strings.HasPrefix(name, "lean") {
		return
	}
	peers := all[len(all)-len(b.workers):]
	for i := range peers {
		m := corePeers[i].over
		r.Add(m, t.Faster(peers[i]), bars[name][m])
	}
}

func (b *onCores) step(table string, c stepCase) (err error) {
	contenders := []measure.Contender{{Name: measure.ReadCeiling, Run: func(steps int) (time.Duration, error) {
		began := time.Now()
		for range steps {
			if _, err := cpu.ReadSum(cpu.Default(), b.memory); err != nil {
				return 0, err
			}
		}
		return time.Since(began), nil
	}}}
	for _, way := range coreWays {
		if way.mixed {
			continue // the rows of a decode step are not rounded, so mixed precision changes nothing
		}
		e := b.engine(way)
		defer func() { err = errors.Join(err, e.close()) }()
		contenders = append(contenders, measure.Contender{Name: way.name, Run: func(steps int) (time.Duration, error) {
			fmt.Fprintf(b.stderr, "%s: %v: %s\n", table, c, way.name)
			_, steady, _, err := e.decode(c.batch, c.context, steps)
			return steady, err
		}})
	}
	for i, w := range b.workers {
		if _, err := w.Ask("read eager %d %d %d", c.batch, c.context, c.steps); err != nil {
			return err
		}
		contenders = append(contenders, b.peer(i, "run eager"))
	}
	all, err := measure.Alternate(measure.Pace{Rounds: b.rounds, Steps: c.steps}, contenders)
	if err != nil {
		return err
	}
	for i := range b.workers {
		if _, err := b.workers[i].Ask("forget"); err != nil {
			return err
		}
	}
	bars := map[string]map[measure.Metric]*measure.Bar{}
	for _, way := range coreWays {
		bars[way.name] = map[measure.Metric]*measure.Bar{measure.OverHF16: measure.AtLeast(2)}
	}
	for i, t := range all {
		name := contenders[i].Name
		r := b.report.Row(table, c.String(), name)
		if j := slices.IndexFunc(coreWays, func(w coreWay) bool { return w.name == name }); j >= 0 {
			r.Add(measure.Tokens, float64(c.batch)/t.Median(), nil)
			// Scales the ceiling's time to the bytes of the step.
			bytes := c.bytesIn(coreWays[j].store)
			r.Add(measure.Share, t.Faster(all[0])*bytes/float64(len(b.memory)), measure.Only(c.batch == 1, measure.OfCeiling(0.85)))
			b.over(r, name, t, all, bars)
		} else if i == 0 {
			r.Add(measure.Speed, float64(len(b.memory))/t.Median()/1e9, nil)
		} else {
			r.Add(measure.Tokens, float64(c.batch)/t.Median(), nil)
		}
	}
	return nil
}

// ownWeights is a random model in which each weight has its own memory. Shared memory would stay in the CPU's
// cache and make steps too fast.
type ownWeights struct{ randomWeights }

func (m ownWeights) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	t, err := m.randomWeights.Tensor(name, shape...)
	if err != nil || len(shape) == 1 {
		return t, err
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(slices.Clone(t.Data().([]la.F16)))), nil
}
