package gpu

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/cmd/leanbench/measure"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/half"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

const (
	tableScale = "Attention of a decode step with its heads or contexts on several GPUs, all in float16, pages of 64, recorded"

	scaleBytes  = 20 << 30 // of keys and values, that layers have together if one has less
	scaleLayers = 8        // at most
	scaleChunk  = 4096     // rows of a prompt at once
	scaleWindow = 64       // keys that they see: what is measured is the step behind them
	scalePeriod = 1000     // numbers until they are the same again
)

// scaling is the flags of the scale command, and what it measures.
type scaling struct {
	json   string
	python string  // that has PyTorch; "": it is not measured
	counts []int   // of GPUs
	ranks  []Ranks // processes that have a model together
	match  *regexp.Regexp
	quick  bool
	mla    bool
	pace   measure.Pace
	cases  []scaleCase
	chains []chainCase
	more   []func(*Scaled) error // behind the cases

	table          string
	splits         func(s Shape, gpus int) int // of FlashDecoding's schedule, which is measured then, too; nil: it is not
	peers          *gpuPeers                   // of whom FlashDecoding is measured on each GPU's share; nil: it is not
	report         *measure.Report
	stdout, stderr io.Writer
}

// scaleCase is a shape, how many times as fast two GPUs should be, which share of their number's times more of them should be,
// and how many times as fast as FlashDecoding on their shares eight; 0: nobody says.
type scaleCase struct {
	Shape
	two, more, flash float64
	context          bool // the cache is dealt out by context, however many KV heads there are
}

func (c *scaleCase) String() string {
	if c.context {
		return c.Shape.String() + ", by context"
	}
	return c.Shape.String()
}

// byContext says whether each of some GPUs has a part of the context.
func (c *scaleCase) byContext(gpus int) bool { return gpus > 1 && (c.context || c.kvHeads%gpus != 0) }

// bar is how many times as fast as one GPU a number of them should be.
func (c *scaleCase) bar(gpus int) *measure.Bar {
	least := c.more * float64(gpus)
	if gpus == 2 {
		least = c.two
	}
	return measure.Only(least > 0, measure.AtLeast(least))
}

// scaleCases are the shapes that bars are for, one that shows what going to other GPUs and
// back takes, and those of the LeanAttention paper's figure 9.
func scaleCases() []scaleCase {
	cases := []scaleCase{
		{Shape: EvenShape(1, 64, 8, 64, 128)},
		{Shape: EvenShape(6, 48, 48, 65536, 64), two: 1.95, more: 0.95},
		{Shape: EvenShape(1, 64, 8, 131072, 128), two: 1.95, more: 0.95},
		{Shape: EvenShape(4, 64, 8, 131072, 128), two: 1.95, more: 0.95},
		{Shape: EvenShape(1, 64, 8, 1<<20, 128), more: 0.95},
		{Shape: EvenShape(1, 64, 8, 1<<22, 128), more: 0.95},
		// By context.
		{Shape: EvenShape(1, 8, 1, 512, 64)}, // a page for each of eight
		{Shape: EvenShape(1, 1, 1, 1<<20, 64), two: 1.85, more: 0.9},
		{Shape: EvenShape(1, 8, 1, 1<<20, 64), two: 1.85, more: 0.9},
		{Shape: EvenShape(1, 1, 1, 1<<22, 64), more: 0.9},
		{Shape: EvenShape(1, 8, 1, 1<<22, 64), more: 0.9},
		{Shape: EvenShape(1, 8, 8, 1<<20, 64), more: 0.9, context: true},
		{Shape: EvenShape(1, 8, 8, 1<<22, 64), more: 0.9, context: true},
		{Shape: EvenShape(16, 32, 1, 65536, 128)},
	}
	for _, heads := range []int{64, 128, 160, 256} {
		for keys := 1 << 10; keys <= 1<<20; keys *= 4 {
			c := scaleCase{Shape: EvenShape(4, heads, heads, keys, 64)}
			if heads == 256 && keys >= 1<<16 {
				c.flash = 2 // as the paper has it
			}
			cases = append(cases, c)
		}
	}
	return cases
}

// Scaled is what parts of the scale command that others have measure with.
type Scaled struct {
	Report *measure.Report
	GPUs   []*device.GPU // one, and all numbers of them that are asked for
	Ranks  []Ranks
	Rounds int
	Quick  bool
	Match  func(is string) bool // whether a case is asked for
	Save   func() error         // behind each case: a run that is cut off keeps it
	Stdout io.Writer
	Stderr io.Writer
}

// Ranks is how many processes have a model together, and how many GPUs each of them has.
type Ranks struct{ Size, GPUs int }

// String is what they are called.
func (r Ranks) String() string {
	if r.GPUs == 1 {
		return fmt.Sprintf("%d ranks", r.Size)
	}
	return fmt.Sprintf("%d ranks x %d GPUs", r.Size, r.GPUs)
}

// ranksOf reads numbers of ranks: 2 is two with a GPU each, and 2x4 two with four each.
func ranksOf(text string) (all []Ranks, err error) {
	for _, t := range strings.Split(text, ",") {
		size, gpus, several := strings.Cut(t, "x")
		r := Ranks{GPUs: 1}
		r.Size, err = strconv.Atoi(size)
		if err == nil && several {
			r.GPUs, err = strconv.Atoi(gpus)
		}
		if err != nil || r.Size < 2 || r.GPUs < 1 {
			return nil, fmt.Errorf("%q is no number of ranks above 1, or such a number x GPUs", t)
		}
		all = append(all, r)
	}
	return all, nil
}

// Name is what so many GPUs are called.
func (x *Scaled) Name(gpu *device.GPU) string { return gpusName(len(gpu.Members())) }

func gpusName(n int) string {
	if n == 1 {
		return "one GPU"
	}
	return fmt.Sprintf("%d GPUs", n)
}

// Scale is the scale command: attention whose heads are on one GPU and on several, in turn, chains of linear layers,
// and more.
func Scale(more ...func(*Scaled) error) func(flags *flag.FlagSet) func(stdout, stderr io.Writer) error {
	return func(flags *flag.FlagSet) func(stdout, stderr io.Writer) error {
		return measureScaleOf(flags, &scaling{
			table: tableScale, pace: measure.Pace{Rounds: 9, Turn: 20 * time.Millisecond}, cases: scaleCases(), chains: chainCases, more: more,
		})
	}
}

func measureScaleOf(flags *flag.FlagSet, s *scaling) func(stdout, stderr io.Writer) error {
	flags.StringVar(&s.json, "json", "", "`file` to write every figure to, with its bar")
	flags.BoolVar(&s.quick, "quick", false, "only what bars are for, and fewer rounds: a minute or so")
	flags.Func("gpus", "`numbers` of GPUs to take beside one, such as 2,4; if nothing is said, all powers of two that there are", func(text string) error {
		for _, t := range strings.Split(text, ",") {
			n, err := strconv.Atoi(t)
			if err != nil || n < 2 {
				return fmt.Errorf("%q is no number of GPUs above 1", t)
			}
			s.counts = append(s.counts, n)
		}
		return nil
	})
	flags.Func("ranks", "`numbers` of processes to take beside one, as steps of models do through NCCL: 2 is two with a GPU each, 2x4 two with four each", func(text string) (err error) {
		s.ranks, err = ranksOf(text)
		return err
	})
	flags.BoolVar(&s.mla, "mla", false, "only latent attention: the context over the processes of -ranks (default: 2), on this machine's cores, and TPLA, against one process; or both over -gpus, against one GPU")
	flags.StringVar(&s.python, "python", "", "`path` of a python that has PyTorch for CUDA: its FLASH_ATTENTION is measured on each GPU's share of the heads or the context, alone (default: none)")
	flags.Func("match", "only shapes whose line matches the `regexp`", func(text string) (err error) {
		s.match, err = regexp.Compile(text)
		return err
	})
	return func(stdout, stderr io.Writer) error {
		m, err := measure.ThisMachine(runtime.GOMAXPROCS(0))
		if err != nil {
			return err
		}
		s.stdout, s.stderr = stdout, stderr
		if s.quick {
			s.pace.Rounds = min(s.pace.Rounds, 3)
			s.cases = slices.DeleteFunc(s.cases, func(c scaleCase) bool { return c.two == 0 || c.batch() == 4 })
		}
		s.report = &measure.Report{Command: "scale", Machine: m, Figures: []measure.Figure{}}
		if s.mla {
			err = s.measureMLA(s.ranks, mlaShapes(s.quick))
		} else {
			err = s.run()
		}
		if len(s.report.Figures) > 0 { // what was measured until something failed is worth keeping
			err = errors.Join(err, s.report.Save(s.json))
		}
		return err
	}
}

// open opens one GPU, and all numbers of them. They are to be closed after an error, too.
func (s *scaling) open() (gpus []*device.GPU, err error) {
	list, err := device.List()
	if err != nil {
		return nil, err
	}
	if s.report.Machine.GPU == "" && len(list) > 0 {
		s.report.Machine.GPU = list[0].Name
	}
	if s.counts == nil {
		for n := 2; n <= len(list); n *= 2 {
			s.counts = append(s.counts, n)
		}
	}
	for _, n := range append([]int{1}, s.counts...) {
		ordinals := make([]int, n)
		for i := range ordinals {
			ordinals[i] = i
		}
		g, err := device.Open(ordinals...)
		if err != nil {
			return gpus, err
		}
		gpus = append(gpus, g)
	}
	return gpus, nil
}

func closeGPUs(gpus []*device.GPU) (err error) {
	for _, g := range gpus {
		err = errors.Join(err, g.Close())
	}
	return err
}

func (s *scaling) run() (err error) {
	gpus, err := s.open()
	defer func() { err = errors.Join(err, closeGPUs(gpus)) }()
	if err != nil {
		return err
	}
	if s.python != "" {
		if s.peers, err = openPeers(s.python, 0, s.report); err != nil {
			return fmt.Errorf("-python %s: %w", s.python, err)
		}
		defer func() { err = errors.Join(err, s.peers.close()) }()
	}
	s.report.WriteHead(s.stdout)
	for i := range s.cases {
		c := &s.cases[i]
		if !s.asked(c.String()) {
			continue
		}
		fmt.Fprintln(s.stderr, c)
		if err := s.measure(c, c.String(), gpus); err != nil {
			return fmt.Errorf("%v: %w", c, err)
		}
		if err := s.save(); err != nil {
			return err
		}
	}
	s.report.WriteTable(s.stdout, s.table)
	for _, c := range s.chains {
		if !s.asked(c.String()) {
			continue
		}
		fmt.Fprintln(s.stderr, c)
		if err := s.measureChain(c, gpus); err != nil {
			return fmt.Errorf("%v: %w", c, err)
		}
		if err := s.save(); err != nil {
			return err
		}
	}
	s.report.WriteTable(s.stdout, tableChain)
	for _, part := range s.more {
		if err := part(&Scaled{s.report, gpus, s.ranks, s.pace.Rounds, s.quick, s.asked, s.save, s.stdout, s.stderr}); err != nil {
			return err
		}
	}
	s.report.WriteVerdict(s.stdout)
	return nil
}

// save keeps what was measured until now: a run that is cut off has it.
func (s *scaling) save() error { return s.report.Save(s.json) }

// asked says whether a case is to be measured.
func (s *scaling) asked(is string) bool { return s.match == nil || s.match.MatchString(is) }

// tooMuch says why a shape is not measured on so many GPUs, of which the first has the least memory left: "" if it is.
func (c *scaleCase) tooMuch(first *device.GPU, gpus int) string {
	m, err := first.Memory()
	if err != nil {
		return err.Error()
	}
	need := c.Bytes() * int64(c.layers()) / int64(gpus)
	if need > m.Free/10*9 {
		return fmt.Sprintf("%d bytes of keys and values on each, of %d free", need, m.Free)
	}
	const speed, most = 3e14, 90 // operations a second of prompts with heads of 64 at least; seconds
	flops := 0.0
	for _, n := range c.lengths {
		flops += 2 * float64(c.kvHeads*c.dim) * float64(n) * float64(n)
	}
	if seconds := flops * float64(c.layers()) / float64(gpus) / speed; c.byContext(gpus) && seconds > most {
		return fmt.Sprintf("its prompts take %.0f s or so", seconds)
	}
	return ""
}

// layers is how many there are, so that keys and values come from memory: one of the longest contexts, whose prompts take long.
func (c *scaleCase) layers() int {
	if slices.Max(c.lengths) > 1<<20 {
		return 1
	}
	return int(min(scaleLayers, max(1, scaleBytes/c.Bytes())))
}

// What is behind the names of those who have FlashDecoding's schedule, and of PyTorch's FlashDecoding.
const (
	fixedSuffix = ", fixed split"
	flashSuffix = ", FLASH_ATTENTION"
)

// measure has all numbers of GPUs take turns that have the memory, and FlashDecoding behind them, in what they give back.
func (s *scaling) measure(c *scaleCase, is string, gpus []*device.GPU) error {
	times, err := s.turns(c, is, gpus)
	if err != nil || s.peers == nil {
		return err
	}
	for _, g := range gpus {
		n := len(g.Members())
		name := gpusName(n)
		ours := times[name]
		if ours == nil {
			continue
		}
		flash, err := s.peers.flashDecoding(c.share(n), s.pace.Rounds)
		if err != nil {
			s.peers.miss(is, "%s: without FlashDecoding: %v", name, err)
			continue
		}
		row := s.report.Row(s.table, is, name+flashSuffix)
		row.Add(measure.LayerMicros, 1e6*flash.Median(), nil)
		row.Add(measure.Speed, float64(c.Bytes())/flash.Median()/1e9, nil)
		bar := measure.Only(n == 8 && c.flash > 0, measure.AtLeast(c.flash))
		s.report.Row(s.table, is, name).Add(measure.OverFlash, flash.Median()*float64(c.layers())/ours.Median(), bar)
	}
	return nil
}

// share is what each of some GPUs has of a shape: its heads, or of too few of them its part of the context.
func (c *scaleCase) share(gpus int) Shape {
	s := c.Shape
	if !c.byContext(gpus) {
		s.heads, s.kvHeads = s.heads/gpus, s.kvHeads/gpus
		return s
	}
	s.lengths = slices.Clone(s.lengths)
	for i, n := range s.lengths {
		s.lengths[i] = (n + gpus - 1) / gpus
	}
	return s
}

// turns are the times of all layers by names of GPUs.
func (s *scaling) turns(c *scaleCase, is string, gpus []*device.GPU) (times map[string]measure.Samples, err error) {
	var contenders []measure.Contender
	numbers := make(map[string]int) // of the GPUs of those with our schedule
	for _, g := range gpus {
		n := len(g.Members())
		if c.byContext(n) && s.splits != nil { // by context there is no schedule to compare with
			continue
		}
		name := gpusName(n)
		if why := c.tooMuch(gpus[0], n); why != "" {
			fmt.Fprintf(s.stderr, "%s: %s: left out: %s\n", is, name, why)
			continue
		}
		r, err := newScaleStep(c, g)
		if errors.Is(err, la.ErrUnsupported) {
			fmt.Fprintf(s.stderr, "%s: %s: left out: %v\n", is, name, err)
			continue
		}
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, r.close()) }()
		add := func(name string, opts ...la.Option) error {
			replay, err := r.record(c, opts...)
			contenders = append(contenders, measure.Contender{Name: name, Run: replay})
			return err
		}
		if err := add(name); err != nil {
			return nil, err
		}
		numbers[name] = n
		if s.splits != nil {
			if err := add(name+fixedSuffix, la.WithSchedule(la.FixedSplit(s.splits(c.Shape, n)))); err != nil {
				return nil, err
			}
		}
	}
	if len(contenders) == 0 {
		return nil, nil
	}
	all, err := measure.Alternate(s.pace, contenders)
	if err != nil {
		return nil, err
	}
	times = make(map[string]measure.Samples)
	for i, x := range all {
		times[contenders[i].Name] = x
	}
	one := times[gpusName(1)]
	for i, x := range all {
		name := contenders[i].Name
		row := s.report.Row(s.table, is, name)
		seconds := x.Median() / float64(c.layers())
		row.Add(measure.LayerMicros, 1e6*seconds, nil)
		row.Add(measure.Speed, float64(c.Bytes())/seconds/1e9, nil)
		n := numbers[name]
		if n == 0 {
			continue
		}
		if one != nil && n > 1 {
			row.Add(measure.OverOneGPU, x.Faster(one), c.bar(n))
		}
		if s.splits != nil {
			row.Add(measure.OverFixed, x.Faster(times[name+fixedSuffix]), nil)
		}
	}
	return times, nil
}

// ReadSpeed is how many bytes the first GPU reads in a second, where nothing else is done. Before compute capability 9.0
// nobody knows.
func ReadSpeed() (speed float64, err error) {
	driver, err := LoadDriver()
	if err != nil {
		return 0, err
	}
	d, err := OpenDevice(driver, 0, rand.New(rand.NewPCG(1, 2)))
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	if err := d.Fill(readShape.rotation(), ArenaPeriod); err != nil {
		return 0, err
	}
	all, err := d.Ceilings(readShape)
	defer func() { err = errors.Join(err, CloseAll(all)) }()
	if err != nil {
		return 0, err
	}
	if len(all) == 0 {
		return 0, fmt.Errorf("no kernel that only reads runs on it")
	}
	times, err := Alternate(5, readShape.Launches(), all)
	if err != nil {
		return 0, err
	}
	for _, t := range times {
		speed = max(speed, float64(readShape.Bytes())/t.Rounds.Median())
	}
	return speed, nil
}

// readShape is 2 GiB: of what a launch reads next to nothing is still in the L2 cache from the one before.
var readShape = EvenShape(1, 32, 32, 1<<17, 128)

// Scaling measures shapes of other commands whose heads are on several GPUs.
type Scaling struct {
	s    *scaling
	gpus []*device.GPU
}

// OpenScaling opens one GPU, and all powers of two of them. Figures go to a table of the report. splits is how
// many splits FlashDecoding's schedule has of a shape on so many GPUs. Peers, if there are some, are measured on each GPU's share.
func (b *Bench) OpenScaling(table string, pace measure.Pace, splits func(s Shape, gpus int) int) (*Scaling, error) {
	s := &scaling{table: table, report: b.Report, pace: pace, splits: splits, peers: b.peers, stderr: b.Stderr}
	gpus, err := s.open()
	if err != nil {
		return nil, errors.Join(err, closeGPUs(gpus))
	}
	return &Scaling{s, gpus}, nil
}

// Most is the largest number of GPUs.
func (x *Scaling) Most() int { return len(x.gpus[len(x.gpus)-1].Members()) }

// Measure measures a shape under a name.
func (x *Scaling) Measure(shape Shape, is string) error {
	return x.s.measure(&scaleCase{Shape: shape}, is, x.gpus)
}

// Close gives the GPUs back.
func (x *Scaling) Close() error { return closeGPUs(x.gpus) }

// scaleStep is a step of layers of attention, which may be recorded several times.
type scaleStep struct {
	gpu        *device.GPU
	cache      *la.Cache
	step       *la.Step
	recordings []*device.Recording
	inputs     []*device.Tensor
	outputs    [][]G.Value // of layers that have run, the last ones
}

func newScaleStep(c *scaleCase, gpu *device.GPU) (r *scaleStep, err error) {
	r = &scaleStep{gpu: gpu}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	shard := la.ShardAuto
	if c.context {
		shard = la.ShardContext
	}
	r.cache, err = la.NewCache(la.CacheConfig{Shard: shard, Layers: c.layers(), KVHeads: c.kvHeads, HeadDim: c.dim, DType: la.Float16,
		PageSize: layerPage, Pages: int(c.pages(layerPage)), Device: gpu})
	if err != nil {
		return r, err
	}
	var appends []la.Append
	for range c.lengths {
		seq, err := r.cache.NewSequence()
		if err != nil {
			return r, err
		}
		appends = append(appends, la.Append{Seq: seq, Tokens: 1})
	}
	if err := r.prompts(c, appends); err != nil {
		return r, err
	}
	if r.step, err = r.cache.NewStep(c.batch()); err != nil {
		return r, err
	}
	return r, r.step.Set(appends)
}

// record records the step with options of attention, and replays it.
func (r *scaleStep) record(c *scaleCase, opts ...la.Option) (replay func(n int) (time.Duration, error), err error) {
	run, err := r.nodes(r.step, c.batch(), c.heads, c, opts...)
	if err != nil {
		return nil, err
	}
	if err := run(); err != nil { // nodes have their memory
		return nil, err
	}
	recording, err := r.gpu.Record(run)
	if err != nil {
		return nil, err
	}
	r.recordings = append(r.recordings, recording)
	return replays(r.gpu, recording), nil
}

// nodes are layers of a step on numbers that are on the GPU, and run them.
func (r *scaleStep) nodes(step *la.Step, rows, heads int, c *scaleCase, opts ...la.Option) (run func() error, err error) {
	g := G.NewGraph()
	var nodes [3]*G.Node
	var in []G.Value
	for i, h := range []int{heads, c.kvHeads, c.kvHeads} {
		x := make([]la.F16, rows*h*c.dim)
		for j := range min(len(x), scalePeriod) {
			x[j] = half.FromFloat32(float32(j*7919%scalePeriod)/500 - 1)
		}
		for n := scalePeriod; n < len(x); n *= 2 { // prompts of 256 heads have 67 million
			copy(x[n:], x[:n])
		}
		t := tensor.New(tensor.WithShape(rows, h*c.dim), tensor.WithBacking(x))
		// As the projections before and behind have them.
		upload := func(x tensor.Tensor) (*device.Tensor, error) { return r.gpu.UploadSharded(x, 1) }
		if c.byContext(len(r.gpu.Members())) {
			upload = r.gpu.UploadReplicated
		}
		d, err := upload(t)
		if err != nil {
			return nil, err
		}
		r.inputs = append(r.inputs, d)
		nodes[i] = G.NewMatrix(g, la.Float16, G.WithShape(rows, h*c.dim), G.WithName(fmt.Sprint("x", i)))
		in = append(in, d)
	}
	var ops []G.Op
	for l := range c.layers() {
		n, err := la.CachedAttention(nodes[0], nodes[1], nodes[2], step.Layer(l), append(slices.Clone(opts), la.WithCausal())...)
		if err != nil {
			return nil, err
		}
		ops = append(ops, n.Op())
	}
	outputs := make([]G.Value, len(ops))
	r.outputs = append(r.outputs, outputs)
	return func() (err error) {
		for i, op := range ops {
			if outputs[i], err = op.Do(in...); err != nil {
				return err
			}
		}
		return nil
	}, nil
}

// prompts gives every sequence all tokens but the last, in steps, through as few query heads
// as there can be, which see a few keys each where they can: the time of what they compute grows with the context then, and not with its square.
func (r *scaleStep) prompts(c *scaleCase, appends []la.Append) error {
	rows := int(min(scaleChunk, c.keys()))
	step, err := r.cache.NewStep(rows)
	if err != nil {
		return err
	}
	var opts []la.Option
	if !c.byContext(len(r.gpu.Members())) { // which has no windows
		opts = append(opts, la.WithWindow(scaleWindow))
	}
	run, err := r.nodes(step, rows, c.kvHeads, c, opts...)
	if err != nil {
		return err
	}
	var all []la.Append
	for i, a := range appends {
		all = append(all, la.Append{Seq: a.Seq, Tokens: c.lengths[i] - 1})
	}
	for chunk := range la.Chunks(rows, all) {
		if err := step.Run(chunk, run); err != nil {
			return err
		}
	}
	return r.gpu.Synchronize()
}

// replays returns the run of a contender: n replays of a recording on a GPU, from the first being queued to the last being done.
func replays(gpu *device.GPU, recording *device.Recording) func(n int) (time.Duration, error) {
	return func(n int) (time.Duration, error) {
		began := time.Now()
		for range n {
			if err := recording.Replay(); err != nil {
				return 0, err
			}
		}
		err := gpu.Synchronize()
		return time.Since(began), err
	}
}

func (r *scaleStep) close() (err error) {
	for _, x := range r.recordings {
		err = errors.Join(err, x.Close())
	}
	if r.step != nil {
		err = errors.Join(err, r.step.Rollback())
	}
	if r.cache != nil {
		err = errors.Join(err, r.cache.Close())
	}
	// What they take would be missing where the next shape needs most of a GPU.
	for _, d := range r.inputs {
		err = errors.Join(err, d.Free())
	}
	for _, outputs := range r.outputs {
		for _, x := range outputs {
			if d, ok := x.(*device.Tensor); ok {
				err = errors.Join(err, d.Free())
			}
		}
	}
	return err
}
