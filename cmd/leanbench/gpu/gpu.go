// Package gpu measures attention on a GPU, alone and against PyTorch and FlashInfer.
package gpu

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"gorgonia.org/leanattention/internal/cuda"

	"gorgonia.org/leanattention/cmd/leanbench/command"
	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// Commands are those of this package.
var Commands = []command.Command{
	{Name: "gpu", Summary: "attention on a GPU: share of its memory's speed, and against PyTorch and FlashInfer", Setup: measureGPU},
	{Name: "gputables", Summary: "tables of what gpu -full -json wrote, and docs/benchmarks/gpu.json", Setup: writeTables},
}

// Options are the flags of the gpu command.
type Options struct {
	json, Python string
	device       int
	budget       time.Duration
	full         bool
	part         gpuPart
	match        *regexp.Regexp // nil: everything
	Peers        bool
	layer        bool
	prefill      bool
	linear       bool
	energy       bool
}

// LoadDriver is a variable for tests, which have another driver.
var LoadDriver = cuda.Load

// measureGPU measures attention on a GPU: how much of its memory's speed it
// reaches, and how many times as fast as PyTorch's and FlashInfer's it is.
func measureGPU(flags *flag.FlagSet) func(stdout, stderr io.Writer) error {
	o := new(Options)
	flags.StringVar(&o.json, "json", "", "`file` to write every figure to, with its bar")
	flags.StringVar(&o.Python, "python", "python3", "`path` of a python that has PyTorch for CUDA")
	flags.BoolVar(&o.Peers, "peers", true, "measure PyTorch and, where it can be imported, FlashInfer")
	flags.IntVar(&o.device, "device", 0, "`number` of the GPU")
	flags.DurationVar(&o.budget, "budget", time.Minute, "about how long to measure: shapes of the sweep are left out, always the same")
	flags.BoolVar(&o.full, "full", false, "all shapes of the sweep, whatever the time")
	flags.Var(&o.part, "part", "`K/N`: only part K of N of the shapes, for a measurement in several runs; what has a name is in the first")
	flags.Func("match", "only shapes whose line matches the `regexp`, such as '^b1, .* x 64$' or '^B:'", func(text string) (err error) {
		o.match, err = regexp.Compile(text)
		return err
	})
	flags.BoolVar(&o.layer, "layer", false, "only what a layer of a decode step costs beyond its kernels")
	flags.BoolVar(&o.prefill, "prefill", false, "only prompts: steps of many queries, in TFLOP/s")
	flags.BoolVar(&o.energy, "energy", false, "also what each contender draws, by NVML: two seconds of each")
	flags.BoolVar(&o.linear, "linear", false, "only linear layers of many rows, in TFLOP/s")
	return func(stdout, stderr io.Writer) error {
		m, err := measure.ThisMachine(runtime.GOMAXPROCS(0))
		if err != nil {
			return err
		}
		b := NewBench(*o, m, stdout, stderr)
		return errors.Join(b.run(context.Background()), b.save())
	}
}

// save writes what was measured until now: a run that fails or is cut off keeps it.
func (b *Bench) save() error {
	if len(b.Report.Figures) == 0 {
		return nil
	}
	return b.Report.Save(b.Options.json)
}

// Bench measures decode shapes on a GPU one after the other.
type Bench struct {
	Report         *measure.Report
	Options        Options
	Stdout, Stderr io.Writer
	Rng            *rand.Rand
	Device         *gpuDevice
	peers          *gpuPeers     // nil: none
	power          *power        // nil: nobody has asked for it
	overBest       []float64     // one for each shape that has peers
	overCUDNN      []float64     // one for each causal prompt
	always         []gpuCase     // that are measured whatever the budget
	prefill        []prefillCase // nil: all; for tests
	linear         []linearCase  // the same
	unchecked      bool          // for tests: see gpuDevice
}

func NewBench(o Options, m measure.Machine, stdout, stderr io.Writer) *Bench {
	return &Bench{
		Report: &measure.Report{Command: "gpu", Machine: m, Figures: []measure.Figure{}}, Options: o, Stdout: stdout, Stderr: stderr,
		Rng:    rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())),
		always: slices.Concat(namedCases(), raggedCases(), groupCases()),
	}
}

// Unchecked is for tests: nothing computes, so outputs are not compared.
func (b *Bench) Unchecked() { b.unchecked = true }

// open opens the GPU, and says which it is. It is to be closed.
func (b *Bench) open() error {
	driver, err := LoadDriver()
	if err != nil {
		return err
	}
	if b.Device, err = OpenDevice(driver, b.Options.device, b.Rng); err != nil {
		return err
	}
	b.Device.unchecked = b.unchecked
	b.Describe()
	return nil
}

// run measures until ctx ends, or somebody interrupts, and then no other shape.
func (b *Bench) run(ctx context.Context) (err error) {
	if err := b.open(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Device.Close()) }()
	if b.Options.layer {
		if b.Options.energy {
			return errors.New("-energy is for decode steps: not for -layer")
		}
		return b.layers()
	}
	if err := b.startPeers(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.peers.close()) }()
	if b.Options.energy {
		if b.Options.prefill || b.Options.linear {
			return errors.New("-energy is for decode steps: not for -prefill and -linear")
		}
		if err := b.OpenPower(); err != nil {
			return fmt.Errorf("-energy: %w", err)
		}
		defer func() { err = errors.Join(err, b.power.close()) }()
	}
	if b.Options.prefill {
		return b.prompts()
	}
	if b.Options.linear {
		return b.layersOfRows()
	}
	cases, err := b.cases()
	if err != nil {
		return err
	}
	if len(cases) == 0 {
		return errors.New("there is no such shape (-match, -part)")
	}
	if err := b.arenas(cases); err != nil {
		return err
	}
	// Not before: until there are figures an interrupt ends the program. So does a second one.
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)
	b.Clock("before")
	b.Report.WriteHead(b.Stdout)
	said := len(b.Report.Notes)
	var failed []error
	for i, c := range cases {
		fmt.Fprintf(b.Stderr, "%d of %d: %s\n", i+1, len(cases), c.shape)
		if err := b.measure(c); err != nil {
			// A shape that fails does not take the others with it, unless all do.
			failed = append(failed, fmt.Errorf("%s: %w", c.shape, err))
			fmt.Fprintln(b.Stderr, failed[len(failed)-1])
			if len(failed) == mostFailures {
				return errors.Join(failed...)
			}
		}
		if err := b.save(); err != nil {
			return err
		}
		end := i+1 == len(cases)
		if !end && ctx.Err() != nil {
			failed = append(failed, fmt.Errorf("interrupted: %d of %d shapes were measured", i+1, len(cases)))
			end = true
		}
		if end || cases[i+1].table != c.table {
			b.Report.WriteTable(b.Stdout, c.table)
		}
		if end && b.power != nil {
			b.Report.WriteTable(b.Stdout, tableEnergy)
		}
		if end {
			break
		}
	}
	if len(b.overBest) > 0 {
		b.Report.Row(tableAll, "", ours).Add(measure.OverBest, geometricMean(b.overBest), measure.AtLeast(leastMean))
		b.Report.WriteTable(b.Stdout, tableAll)
	}
	b.Clock("after")
	if notes := b.Report.Notes[said:]; len(notes) > 0 { // what came up on the way
		fmt.Fprintf(b.Stdout, "\n- %s\n", strings.Join(notes, "\n- "))
	}
	b.Report.WriteVerdict(b.Stdout)
	return errors.Join(failed...)
}

// mostFailures is after how many failed shapes a measurement ends.
const mostFailures = 3

const tableAll = "All shapes with peers, geometric mean"

// leastMean is its bar.
const leastMean = 1.10

func geometricMean(x []float64) float64 {
	sum := 0.0
	for _, v := range x {
		sum += math.Log(v)
	}
	return math.Exp(sum / float64(len(x)))
}

// Note adds a note to the report, if it is not there yet.
func (b *Bench) Note(format string, args ...any) {
	if text := fmt.Sprintf(format, args...); !slices.Contains(b.Report.Notes, text) {
		b.Report.Notes = append(b.Report.Notes, text)
	}
}

// Describe names the device and its driver.
func (b *Bench) Describe() {
	i := b.Device.dev.Info()
	b.Report.Machine.GPU = i.Name
	b.Note("GPU %d: %s, compute capability %d.%d, %d SMs, %.1f GiB, L2 of %.0f MiB", i.Ordinal, i.Name, i.Capability/10, i.Capability%10,
		i.Multiprocessors, float64(i.MemoryBytes)/(1<<30), float64(i.L2Bytes)/(1<<20))
	release := smi(i.Ordinal, "driver_version")
	if release == "" {
		release = "of unknown release"
	}
	b.Note("driver %s, CUDA %s", release, b.Device.driver.Version())
	setVersion(b.Report, "driver", release)
}

// smi asks the driver's own program, where it is installed.
func smi(ordinal int, what string) string {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "nvidia-smi", "--query-gpu="+what, "--format=csv,noheader", fmt.Sprint("--id=", ordinal)).Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

// clockShape is what is read while somebody looks at the clock.
var clockShape = EvenShape(1, 1, 1, 1<<18, 64)

// Clock notes the SM clock while the GPU reads memory. Without nvidia-smi, or
// without a kernel that reads, there is no note.
func (b *Bench) Clock(when string) {
	if _, err := exec.LookPath("nvidia-smi"); err != nil {
		return
	}
	all, err := b.Device.Ceilings(clockShape)
	if err != nil || len(all) == 0 {
		return
	}
	done := make(chan error, 1)
	go func() {
		var err error
		for end := time.Now().Add(time.Second); err == nil && time.Now().Before(end); {
			_, err = all[0].Replay(gpuMarks - 1)
		}
		done <- err
	}()
	time.Sleep(200 * time.Millisecond)
	clock := smi(b.Device.dev.Info().Ordinal, "clocks.sm,clocks.mem")
	if err := errors.Join(<-done, CloseAll(all)); err == nil && clock != "" {
		b.Note("SM and memory clock %s %s", when, clock)
		b.Report.Clocks = append(b.Report.Clocks, parseClock(when, clock))
	}
}

// parseClock reads what nvidia-smi says, as "1980 MHz, 2619 MHz".
func parseClock(when, text string) measure.Clock {
	c := measure.Clock{When: when}
	fmt.Sscanf(text, "%d MHz, %d MHz", &c.SM, &c.Memory) // what it does not say stays 0
	return c
}

// cases are what there is memory and time for.
func (b *Bench) cases() ([]gpuCase, error) {
	memory, err := b.Device.dev.Memory()
	if err != nil {
		return nil, err
	}
	most := memory.Free / 10 * 8
	if b.peers != nil {
		most = memory.Free / 10 * 4 // they have operands of their own
	}
	always := b.Options.matching(b.always)
	if !b.Options.part.first() {
		always = nil
	}
	for _, c := range always {
		if c.shape.Region() > most {
			return nil, fmt.Errorf("%s: %w: keys and values take %d MB, and there are %d", c.shape, cuda.ErrOutOfMemory,
				c.shape.Region()>>20, most>>20)
		}
	}
	sweep := sweepCases()
	picked := b.Options.matching(b.Options.part.of(sweep))
	if !b.Options.full {
		left := b.Options.budget
		for _, c := range always {
			left -= c.cost()
		}
		// From all of them, so that the memory that is free does not change which.
		picked = within(picked, left)
	}
	n := len(picked)
	picked = slices.DeleteFunc(picked, func(c gpuCase) bool { return c.shape.Region() > most })
	b.Note("%d of the %d shapes of the sweep; for %d more there is no memory", len(picked), len(sweep), n-len(picked))
	return slices.Concat(always, picked), nil
}

// matching leaves out what does not match.
func (o *Options) matching(cases []gpuCase) []gpuCase {
	if o.match == nil {
		return cases
	}
	return slices.DeleteFunc(slices.Clone(cases), func(c gpuCase) bool { return !o.match.MatchString(c.shape.String()) })
}

// arenas takes memory for the largest case, here and in the peers' process.
func (b *Bench) arenas(cases []gpuCase) error {
	size := clockShape.rotation()
	for _, c := range cases {
		size = max(size, c.shape.rotation())
	}
	if err := b.Device.Fill(size, ArenaPeriod); err != nil {
		return err
	}
	return b.peers.arena(size)
}

const ours = "lean"

// measure times a case and takes its figures down.
func (b *Bench) measure(c gpuCase) (err error) {
	all, ceilings, err := b.contenders(c)
	defer func() { err = errors.Join(err, CloseAll(all)) }()
	if err != nil {
		return err
	}
	times, err := Alternate(c.rounds(), c.shape.Launches(), all)
	if err != nil {
		return err
	}
	b.judge(c, all, times, ceilings)
	if b.power != nil {
		return b.addEnergy(c, all, ceilings)
	}
	return nil
}

// contenders are those of a case, the ceilings first. On error too they are to be
// closed.
func (b *Bench) contenders(c gpuCase) (all []*Contender, ceilings int, err error) {
	if all, err = b.Device.Ceilings(c.shape); err != nil {
		return nil, 0, err
	}
	ceilings = len(all)
	d := b.Device
	add := func(name string, who func(string, *gpuProblem) (*Contender, error), p gpuProblem) {
		if err != nil {
			return
		}
		var one *Contender
		if one, err = who(name, &p); one != nil {
			all = append(all, one)
		}
	}
	if c.shape.even() {
		add(ours, d.attention, layOut(c.shape, 0, d.rng))
	}
	for _, n := range c.pages {
		p := layOut(c.shape, n, d.rng)
		add(pageName(n), d.attention, p)
		add(readerName(n), d.reader, p)
	}
	for _, n := range c.groups {
		s := c.shape
		s.heads *= n
		add(groupName(n), d.attention, layOut(s, 0, d.rng))
	}
	if err != nil || len(c.groups) > 0 {
		return all, ceilings, err
	}
	return append(all, b.peers.contenders(c.shape)...), ceilings, nil
}

func pageName(tokens int) string   { return fmt.Sprintf("%s, pages of %d", ours, tokens) }
func readerName(tokens int) string { return fmt.Sprintf("reader of pages of %d", tokens) }
func groupName(n int) string       { return fmt.Sprintf("%s, groups of %d", ours, n) }
