package e2e

import (
	"gorgonia.org/leanattention/cmd/leanbench/gpu"
	"gorgonia.org/leanattention/cmd/leanbench/measure"

	_ "embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"runtime"
	"slices"
	"strings"
	"time"
)

//go:embed decoder.py
var decoderWorker string

// e2eGPUOptions are the flags of the e2e command on a GPU.
type e2eGPUOptions struct {
	json, python      string
	quick, peers      bool
	mixed             bool
	shapes            string
	batches, contexts string
	long, attn        string
	prompts           string
	steps, chunk      int
	patience          time.Duration
}

func e2eGPUFlags(flags *flag.FlagSet) *e2eGPUOptions {
	o := new(e2eGPUOptions)
	flags.StringVar(&o.shapes, "shapes", "125m,1.3b,6.7b", "with -device gpu: `sizes` of OPT, and "+strings.Join(slices.Sorted(maps.Keys(llamaShapes)), ", "))
	flags.StringVar(&o.batches, "batches", "1,16", "with -device gpu: `numbers` of sequences")
	flags.StringVar(&o.contexts, "contexts", "1024", "with -device gpu: `tokens` that each sequence has before the steps")
	flags.StringVar(&o.long, "long", "8192,32768", "with -device gpu: `tokens` before the steps of one sequence of OPT-6.7b, without peers; positions are added where the model has too few")
	flags.StringVar(&o.attn, "attn", "fixed,default", "with -device gpu: what else one sequence of OPT-6.7b is decoded with, in turn: `attention`, fixed or default")
	flags.StringVar(&o.prompts, "prompts", "", "with -device gpu: measure prompts of OPT instead of steps: `numbers` of prompts and their tokens, such as 1x2048,16x512")
	flags.IntVar(&o.steps, "steps", 50, "with -device gpu: `number` of steps in a turn")
	flags.IntVar(&o.chunk, "chunk", 0, "with -device gpu: `rows` of our graph for prompts (0: the decoder's default)")
	flags.BoolVar(&o.mixed, "mixed", false, "with -device gpu: our steps are in mixed precision, as transformers' are (prompts are measured with it and without)")
	flags.DurationVar(&o.patience, "patience", 4*time.Minute, "with -device gpu: the longest that transformers may take to make a model or to compile; then they are left out")
	flags.BoolVar(&o.peers, "peers", true, "with -device gpu: measure transformers")
	return o
}

// run measures decoders on a GPU. Turns alternate with transformers on the same GPU.
func (o *e2eGPUOptions) run(stdout, stderr io.Writer) error {
	var cases []stepCase
	prompts, err := o.promptCases()
	if err == nil && len(prompts) == 0 {
		cases, err = o.cases()
	}
	if err != nil {
		return err
	}
	if o.patience <= 0 {
		return fmt.Errorf("-patience %v is not positive", o.patience)
	}
	m, err := measure.ThisMachine(runtime.GOMAXPROCS(0))
	if err != nil {
		return err
	}
	b := &e2eGPU{
		Bench:  gpu.NewBench(gpu.Options{Python: o.python, Peers: o.peers}, m, stdout, &clocked{w: stderr, began: time.Now()}),
		rounds: 7, chunk: o.chunk, mixed: o.mixed, ceiling: ceilingShape, json: o.json, patience: o.patience,
	}
	b.Report.Command = "e2e -device gpu"
	if o.quick {
		b.rounds = 3
	}
	err = b.run(cases, prompts)
	return errors.Join(err, b.save())
}

// save saves the report of the figures so far, so that a failed or interrupted run keeps its figures.
func (b *e2eGPU) save() error {
	if len(b.Report.Figures) == 0 {
		return nil
	}
	return b.Report.Save(b.json)
}

// clocked prefixes each line with the time since began.
type clocked struct {
	w     io.Writer
	began time.Time
}

func (c *clocked) Write(line []byte) (int, error) {
	if _, err := fmt.Fprintf(c.w, "%4.0f s: %s", time.Since(c.began).Seconds(), line); err != nil {
		return 0, err
	}
	return len(line), nil
}

// stepCase is a decode step of a batch of sequences with equal contexts.
type stepCase struct {
	shape                 shape
	batch, context, steps int
	peers                 bool
	others                []string     // further attention variants, by name
	compiled              *measure.Bar // speedup over the compiled step of transformers
	share                 *measure.Bar // share of the ceiling
}

const longShape = "6.7b"

// cases returns the cases in order of shape.
func (o *e2eGPUOptions) cases() (all []stepCase, err error) {
	batches, err := measure.Counts("batches", o.batches)
	if err != nil {
		return nil, err
	}
	contexts, err := measure.Counts("contexts", o.contexts)
	if err != nil {
		return nil, err
	}
	long, err := measure.Counts("long", o.long)
	if err != nil {
		return nil, err
	}
	others := measure.Fields(o.attn)
	for _, way := range others {
		if _, ok := otherWays[way]; !ok {
			return nil, fmt.Errorf("-attn: %q is neither fixed nor default", way)
		}
	}
	if o.steps < 1 {
		return nil, fmt.Errorf("-steps %d is not positive", o.steps)
	}
	for _, name := range strings.Split(o.shapes, ",") {
		first, positions := len(all), 0
		add := func(batch, context int, peers bool) {
			all = append(all, stepCase{
				batch: batch, context: context, steps: o.steps, peers: peers,
				compiled: compiledBar(name, batch, context), share: shareBar(name, batch),
			})
			if name == longShape && batch == 1 {
				all[len(all)-1].others = others
			}
			positions = max(positions, context+o.steps)
		}
		for _, c := range contexts {
			for _, n := range batches {
				add(n, c, true)
			}
		}
		for _, c := range long {
			if name == longShape {
				add(1, c, false)
			}
		}
		s, err := shapeNamed(name, positions)
		if err != nil {
			return nil, err
		}
		for i := first; i < len(all); i++ {
			all[i].shape = s
		}
	}
	if len(all) == 0 {
		return nil, errors.New("-batches, -contexts and -long leave nothing to measure")
	}
	return all, nil
}

// compiledBar returns the bar of the speedup over the compiled step of transformers.
func compiledBar(shape string, batch, context int) *measure.Bar {
	least := map[string]map[int]float64{
		"125m": {1: 2.5, 16: 2},
		"1.3b": {1: 2.2, 16: 1.6, 32: 1.15, 64: 1.15, 128: 1.15},
		"6.7b": {1: 1.6, 16: 1.35, 32: 1.15, 64: 1.15, 128: 1.15},
	}[shape][batch]
	return measure.Only(least > 0 && context == 1024, measure.AtLeast(least))
}

// shareBar returns the bar of the share of the ceiling.
func shareBar(shape string, batch int) *measure.Bar {
	least := map[string]map[int]float64{
		longShape:      {1: 0.88},
		"llama-3.2-1b": {1: 0.80},
		"llama-3-8b":   {1: 0.92, 16: 0.85},
	}[shape][batch]
	if batch > fewSequences {
		least = 0.85
	}
	return measure.Only(least > 0, measure.OfCeiling(least))
}

// fewSequences is the largest batch whose linear layers run as GEMVs. Larger batches have separate tables and
// no eager peer.
const fewSequences = 16

func (c stepCase) String() string { return fmt.Sprintf("b%d, behind %d tokens", c.batch, c.context) }

func (c stepCase) table() string {
	if c.batch > fewSequences {
		return fmt.Sprintf("A decode step of many sequences of %v in float16", c.shape)
	}
	return fmt.Sprintf("A decode step of %v in float16", c.shape)
}

// bytes returns the bytes that an average step of c reads: weights, and keys and values in float16.
func (c stepCase) bytes() float64 { return c.bytesIn(measure.StoreF16) }

// bytesIn returns the same as bytes for weights, keys and values of another element type.
func (c stepCase) bytesIn(s measure.Storage) float64 {
	weights, token := c.shape.bytes(s)
	keys := float64(c.context) + float64(c.steps+1)/2
	return float64(weights) + float64(c.batch)*keys*float64(token)
}

// e2eGPU measures one case on a GPU at a time.
type e2eGPU struct {
	*gpu.Bench
	rounds, chunk int
	mixed         bool            // steps of leanattention are in mixed precision
	ceiling       gpu.Shape       // bytes that one launch of the ceiling reads
	worker        *measure.Worker // nil: there are no peers, or the worker is gone
	json          string
	patience      time.Duration // limit for a worker's answer; 0: the default of package measure
}

// ceilingShape has 2 GiB of keys and values, so that almost none of them are in the L2 cache from the
// previous launch.
var ceilingShape = gpu.EvenShape(1, 32, 32, 1<<17, 128)

const nameCompiled, nameEager = "transformers, compiled", "transformers, eager"

type peerWay struct{ way, name string }

// peerWays lists the worker's execution modes and their names, in the order of their turns.
var peerWays = []peerWay{{"compiled", nameCompiled}, {"eager", nameEager}}

// Tests replace the worker and the decoders.
var (
	startDecoderWorker = func(python string) (*measure.Worker, error) {
		return measure.StartWorker(python, decoderWorker, "cuda:0")
	}
	openGPU = openLeanGPU
)

// decoder is leanattention's engine, with operations that peers do not have.
type decoder interface {
	engine
	check() error
	// mix switches later steps to mixed precision.
	mix()
	// giveBack returns all memory except the weights to the driver.
	giveBack() error
	// attending returns a decoder of the same weights with another attention variant from otherWays. It must be closed
	// before this one.
	attending(way string) engine
	// fixedSplit returns attending of FlashDecoding's schedule.
	fixedSplit() engine
	// reading returns a prompt reader of the same weights. mixed allows mixed precision.
	reading(mixed bool) promptReader
}

// otherWays maps names of attention variants, as in otherSchedules, to the metric of the speedup over
// the variant.
var otherWays = map[string]measure.Metric{"fixed": measure.OverFixed, "default": measure.OverDefault}

func (b *e2eGPU) run(cases []stepCase, prompts []promptCase) (err error) {
	driver, err := gpu.LoadDriver()
	if err != nil {
		return err
	}
	if b.Device, err = gpu.OpenDevice(driver, 0, b.Rng); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Device.Close()) }()
	b.Describe()
	if err := b.Device.Fill(int64(b.ceiling.Sets())*b.ceiling.Region(), gpu.ArenaPeriod); err != nil {
		return err
	}
	ceilings, err := b.Device.Ceilings(b.ceiling)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, gpu.CloseAll(ceilings)) }()
	if err := b.startWorker(); err != nil {
		return err
	}
	defer func() {
		if b.worker != nil {
			err = errors.Join(err, b.worker.Close())
		}
	}()
	b.Clock("before")
	b.Report.WriteHead(b.Stdout)
	said := len(b.Report.Notes)
	var failed []error
	// After a failed shape the run continues with the next shape.
	fails := func(s fmt.Stringer, err error) {
		if err != nil {
			failed = append(failed, fmt.Errorf("%v: %w", s, err))
			fmt.Fprintln(b.Stderr, failed[len(failed)-1])
		}
	}
	for len(prompts) > 0 {
		n := 1
		for n < len(prompts) && prompts[n].shape.name == prompts[0].shape.name {
			n++
		}
		fails(prompts[0].shape, b.measurePrompts(prompts[:n]))
		b.Report.WriteTable(b.Stdout, prompts[0].table())
		prompts = prompts[n:]
	}
	for len(cases) > 0 {
		n := 1
		for n < len(cases) && cases[n].shape.String() == cases[0].shape.String() {
			n++
		}
		fails(cases[0].shape, b.measureShape(cases[:n], ceilings))
		for i, c := range cases[:n] {
			if i == 0 || c.table() != cases[i-1].table() {
				b.Report.WriteTable(b.Stdout, c.table())
			}
		}
		cases = cases[n:]
	}
	b.Clock("after")
	if notes := b.Report.Notes[said:]; len(notes) > 0 { // notes added during the run
		fmt.Fprintf(b.Stdout, "\n- %s\n", strings.Join(notes, "\n- "))
	}
	b.Report.WriteVerdict(b.Stdout)
	return errors.Join(failed...)
}

func (b *e2eGPU) startWorker() (err error) {
	if !b.Options.Peers {
		b.Note("no peers, because of -peers=false")
		return nil
	}
	python := b.Options.Python
	if python == "" {
		python = "python3"
	}
	fmt.Fprintln(b.Stderr, "starting transformers")
	if b.worker, err = startDecoderWorker(python); err != nil {
		return fmt.Errorf("the peers do not start (-peers=false measures without, -python names another python): %w", err)
	}
	b.worker.Patience = b.patience
	if hello := strings.Join(b.worker.Hello, " "); !slices.Contains(b.Report.Notes, hello) {
		b.Note("%s", hello)
	}
	return nil
}

// theirs makes the worker create the transformers model of a shape, after leanattention has created its own. It
// restarts a worker that is gone, at most once per shape.
func (b *e2eGPU) theirs(s shape) error {
	if b.worker == nil && b.Options.Peers {
		if err := b.startWorker(); err != nil {
			return err
		}
	}
	if b.worker == nil {
		return nil
	}
	fmt.Fprintf(b.Stderr, "%v: transformers make weights\n", s)
	return b.kept(makeTheirs(b.worker, s, "float16"))
}

// kept closes and drops the worker if the worker is gone. It returns err.
func (b *e2eGPU) kept(err error) error {
	if err != nil && b.worker.Gone {
		b.worker.Close() // err already describes the failure
		b.worker = nil
	}
	return err
}

// measureShape measures cases of one model.
func (b *e2eGPU) measureShape(cases []stepCase, ceilings []*gpu.Contender) (err error) {
	s := cases[0].shape
	fmt.Fprintf(b.Stderr, "%v: making weights\n", s)
	ours, err := openGPU(s, b.chunk)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ours.close()) }()
	if b.mixed {
		ours.mix()
	}
	fmt.Fprintf(b.Stderr, "%v: checking tokens\n", s)
	if err := ours.check(); err != nil {
		return err
	}
	if slices.ContainsFunc(cases, func(c stepCase) bool { return c.peers }) {
		if err := b.theirs(s); err != nil {
			return err
		}
	}
	var failed []error
	for _, c := range cases {
		// After a failed case, for example for lack of memory, the shape continues with the next case.
		if err := b.measureCase(c, ours, ceilings); err != nil {
			failed = append(failed, fmt.Errorf("%v: %w", c, err))
			fmt.Fprintf(b.Stderr, "%v, %v\n", s, failed[len(failed)-1])
		}
		if err := b.save(); err != nil {
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}

// measureCase measures leanattention first, and then leanattention and the peers in alternation. Peers may
// need minutes to get ready. The first measurement is saved before that, so an interrupted run keeps it.
func (b *e2eGPU) measureCase(c stepCase, ours decoder, ceilings []*gpu.Contender) (err error) {
	defer func() {
		if b.worker != nil { // the next case may need the memory
			_, gone := b.worker.Ask("forget")
			err = errors.Join(err, b.kept(gone))
		}
	}()
	contenders := make([]measure.Contender, 0, len(ceilings)+1+len(c.others)+len(peerWays))
	for _, x := range ceilings {
		contenders = append(contenders, measure.Contender{Name: x.Name, Run: func(steps int) (time.Duration, error) {
			t, err := x.Replay(4)
			if err != nil {
				return 0, err
			}
			return time.Duration(float64(steps) * measure.Median(t) * c.bytes() / float64(b.ceiling.Bytes()) * float64(time.Second)), nil
		}})
	}
	add := func(name string, e engine) {
		contenders = append(contenders, measure.Contender{Name: name, Run: func(steps int) (time.Duration, error) {
			fmt.Fprintf(b.Stderr, "%v, %v: %s\n", c.shape, c, name)
			_, steady, _, err := e.decode(c.batch, c.context, steps)
			return steady, err
		}})
	}
	add(b.name(), ours)
	var others []engine
	defer func() {
		for _, e := range others {
			err = errors.Join(err, e.close())
		}
	}()
	for _, way := range c.others {
		others = append(others, ours.attending(way))
		add(way, others[len(others)-1])
	}
	pace := measure.Pace{Rounds: b.rounds, Steps: c.steps}
	all, err := measure.Alternate(pace, contenders)
	if err != nil {
		return err
	}
	b.tell(c, contenders, all)
	b.judgeSteps(c, contenders, all, len(ceilings))
	if err := b.save(); err != nil {
		return err
	}
	ready, alone, err := b.prepare(c, ours)
	if err != nil || len(ready) == 0 {
		return err
	}
	texts := make(map[string][]string)
	var peers []measure.Contender
	for _, p := range ready {
		peers = append(peers, measure.Contender{Name: p.name, Run: func(steps int) (time.Duration, error) {
			fmt.Fprintf(b.Stderr, "%v, %v: %s\n", c.shape, c, p.name)
			t, ids, err := b.worker.Seconds(1, "run %s %d", p.way, steps)
			if err != nil {
				return 0, err
			}
			texts[p.name] = ids
			return t[0], nil
		}})
	}
	turns := peers
	if contenders = append(contenders, peers...); !alone {
		turns, all = contenders, nil
	}
	more, err := measure.Alternate(pace, turns)
	if err != nil {
		return b.kept(err)
	}
	all = append(all, more...)
	b.tell(c, contenders, all)
	// Both peers have the same weights, so their first two tokens differ only if two tokens are almost
	// equally likely. Later tokens may differ because of rounding.
	if x, y := texts[nameCompiled], texts[nameEager]; x != nil && y != nil && !slices.Equal(x[:min(2, len(x))], y[:min(2, len(y))]) {
		b.Note("%v, %v: the texts of transformers, compiled and eager, differ from the start", c.shape, c)
	}
	b.Report.Drop(c.table(), c.String())
	b.judgeSteps(c, contenders, all, len(ceilings))
	return nil
}

const nameLean16 = "lean"

// name returns the name of leanattention's steps.
func (b *e2eGPU) name() string {
	if b.mixed {
		return nameMixed
	}
	return nameLean16
}

// tell prints the times so far to stderr.
func (b *e2eGPU) tell(c stepCase, contenders []measure.Contender, all []measure.Samples) {
	var times []string
	for i, t := range all {
		times = append(times, fmt.Sprintf("%s %.3f ms", contenders[i].Name, 1e3*t.Median()))
	}
	fmt.Fprintf(b.Stderr, "%v, %v: %s\n", c.shape, c, strings.Join(times, ", "))
}

// without adds a note with the reason why a peer is left out.
func (b *e2eGPU) without(c stepCase, name string, err error) {
	reason, _, _ := strings.Cut(err.Error(), "\n") // stderr's last lines may follow
	reason, _, _ = strings.Cut(reason, ". ")       // PyTorch adds details about its memory
	b.Note("%v, %v: without %s: %s", c.shape, c, name, strings.TrimSuffix(reason, ":"))
}

// prepare makes the peers read their prompts and compile. A failure of a peer becomes a note, and the case
// continues without the peer. If a peer lacks memory beside leanattention's decoder, prepare frees the
// decoder's memory of the case. If the peer then has enough memory, alone is true, and the peers run after
// leanattention instead of in alternation.
func (b *e2eGPU) prepare(c stepCase, ours decoder) (ready []peerWay, alone bool, err error) {
	if b.worker == nil || !c.peers {
		return nil, false, nil
	}
	ways := peerWays
	if c.batch > fewSequences {
		ways = ways[:1]
	}
	for _, p := range ways {
		fmt.Fprintf(b.Stderr, "%v, %v: %s gets ready\n", c.shape, c, p.name)
		read := func() ([]string, error) {
			words, err := b.worker.Ask("read %s %d %d %d", p.way, c.batch, c.context, c.steps)
			return words, b.kept(err)
		}
		words, err := read()
		if err != nil && strings.Contains(err.Error(), "OutOfMemory") && len(ready) == 0 && !alone {
			if err := ours.giveBack(); err != nil {
				return nil, false, err
			}
			fmt.Fprintf(b.Stderr, "%v, %v: %s gets ready alone\n", c.shape, c, p.name)
			if words, err = read(); err == nil {
				alone = true
				b.Note("%v, %v: %s not in turn with ours, behind them: both are more than the GPU's memory", c.shape, c, p.name)
			}
		}
		if err != nil {
			b.without(c, p.name, err)
			if b.worker == nil {
				return nil, false, nil // the modes that were ready are gone with the worker
			}
			continue
		}
		if len(words) > 0 {
			b.Note("%v, %v: %s: %s", c.shape, c, p.name, strings.Join(words, " "))
		}
		ready = append(ready, p)
	}
	return ready, alone, nil
}

// judgeSteps adds the figures of a case. The first contenders are the ceilings, whose time is the time to
// read the bytes of a step.
func (b *e2eGPU) judgeSteps(c stepCase, contenders []measure.Contender, all []measure.Samples, ceilings int) {
	times := make(map[string]measure.Samples)
	var ceiling measure.Samples
	for i, t := range all {
		if times[contenders[i].Name] = t; i < ceilings && (ceiling == nil || t.Median() < ceiling.Median()) {
			ceiling = t // the faster ceiling
		}
	}
	if ceiling != nil {
		r := b.Report.Row(c.table(), c.String(), measure.ReadCeiling)
		r.Add(measure.StepMillis, 1e3*ceiling.Median(), nil)
		r.Add(measure.StepBytes, c.bytes()/1e9, nil)
		r.Add(measure.Speed, c.bytes()/ceiling.Median()/1e9, nil)
	}
	for i, t := range all[ceilings:] {
		name := contenders[ceilings+i].Name
		ours := name == b.name()
		r := b.Report.Row(c.table(), c.String(), name)
		r.Add(measure.StepMillis, 1e3*t.Median(), nil)
		r.Add(measure.StepBytes, c.bytes()/1e9, nil)
		r.Add(measure.Speed, c.bytes()/t.Median()/1e9, nil)
		if ceiling != nil {
			r.Add(measure.GPUShare, t.Faster(ceiling), measure.Only(ours, c.share))
		}
		if !ours {
			continue
		}
		if peer := times[nameCompiled]; peer != nil {
			r.Add(measure.OverCompiled, t.Faster(peer), c.compiled)
		}
		if peer := times[nameEager]; peer != nil {
			r.Add(measure.OverEager, t.Faster(peer), nil)
		}
		for _, way := range c.others {
			if other := times[way]; other != nil {
				r.Add(otherWays[way], t.Faster(other), nil)
			}
		}
	}
}
