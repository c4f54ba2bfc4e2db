package gpu

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"

	"gorgonia.org/leanattention/cmd/leanbench/measure"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/half"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

const (
	tableScale = "Attention of a decode step with its heads on several GPUs, all in float16, pages of 64, recorded"

	scaleBytes  = 1 << 30 // of keys and values, that layers have together if one has less
	scaleLayers = 8       // at most
	scaleChunk  = 4096    // rows of a prompt at once
)

// scaling is the flags of the scale command, and what it measures.
type scaling struct {
	json   string
	counts []int // of GPUs
	match  *regexp.Regexp
	pace   measure.Pace
	cases  []scaleCase

	report         *measure.Report
	stdout, stderr io.Writer
}

// scaleCase is a shape, and how many times as fast two GPUs should be; 0: nobody says.
type scaleCase struct {
	Shape
	two float64
}

// scaleCases are the shapes that bars are for, one that shows what going to other GPUs and
// back takes, and those of the LeanAttention paper's figure 9.
func scaleCases() []scaleCase {
	cases := []scaleCase{
		{EvenShape(1, 64, 8, 64, 128), 0},
		{EvenShape(6, 48, 48, 65536, 64), 1.95},
		{EvenShape(1, 64, 8, 131072, 128), 1.95},
		{EvenShape(4, 64, 8, 131072, 128), 1.95},
	}
	for _, heads := range []int{64, 128, 160, 256} {
		for keys := 1 << 10; keys <= 1<<20; keys *= 4 {
			cases = append(cases, scaleCase{EvenShape(4, heads, heads, keys, 64), 0})
		}
	}
	return cases
}

// measureScale measures attention whose heads are on one GPU and on several, in turn.
func measureScale(flags *flag.FlagSet) func(stdout, stderr io.Writer) error {
	return measureScaleOf(flags, &scaling{pace: measure.Pace{Rounds: 9, Turn: 20 * time.Millisecond}, cases: scaleCases()})
}

func measureScaleOf(flags *flag.FlagSet, s *scaling) func(stdout, stderr io.Writer) error {
	flags.StringVar(&s.json, "json", "", "`file` to write every figure to, with its bar")
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
		s.report = &measure.Report{Command: "scale", Machine: m, Figures: []measure.Figure{}}
		err = s.run()
		if len(s.report.Figures) > 0 { // what was measured until something failed is worth keeping
			err = errors.Join(err, s.report.Save(s.json))
		}
		return err
	}
}

func (s *scaling) run() (err error) {
	list, err := la.GPUs()
	if err != nil {
		return err
	}
	if s.counts == nil {
		for n := 2; n <= len(list); n *= 2 {
			s.counts = append(s.counts, n)
		}
	}
	var gpus []*la.GPU
	defer func() {
		for _, g := range gpus {
			err = errors.Join(err, g.Close())
		}
	}()
	for _, n := range append([]int{1}, s.counts...) {
		ordinals := make([]int, n)
		for i := range ordinals {
			ordinals[i] = i
		}
		g, err := la.OpenGPUs(ordinals...)
		if err != nil {
			return err
		}
		gpus = append(gpus, g)
	}
	s.report.WriteHead(s.stdout)
	for _, c := range s.cases {
		if s.match != nil && !s.match.MatchString(c.String()) {
			continue
		}
		if why := c.tooMuch(gpus[0]); why != "" {
			fmt.Fprintf(s.stderr, "%v: left out: %s\n", c, why)
			continue
		}
		fmt.Fprintln(s.stderr, c)
		if err := s.measure(c, gpus); err != nil {
			return fmt.Errorf("%v: %w", c, err)
		}
	}
	s.report.WriteTable(s.stdout, tableScale)
	s.report.WriteVerdict(s.stdout)
	return nil
}

// tooMuch says why a shape is not measured on one GPU beside others: there is no memory, or
// the prompts take too long.
func (c *scaleCase) tooMuch(one *la.GPU) string {
	m, err := one.Memory()
	if err != nil {
		return err.Error()
	}
	if need := c.Bytes() / 2 * 3; need > m.Free {
		return fmt.Sprintf("%d bytes of keys and values, and those of others, of %d free", c.Bytes(), m.Free)
	}
	const speed, most = 1e14, 20 // operations a second of prompts at least; seconds
	flops := 0.0
	for _, n := range c.lengths {
		flops += 2 * float64(c.kvHeads*c.dim) * float64(n) * float64(n)
	}
	if flops*float64(c.layers())/speed > most {
		return fmt.Sprintf("its prompts take %.0f s or so", flops*float64(c.layers())/speed)
	}
	return ""
}

// layers is how many there are, so that keys and values come from memory.
func (c *scaleCase) layers() int {
	return int(min(scaleLayers, max(1, scaleBytes/c.Bytes())))
}

func (s *scaling) measure(c scaleCase, gpus []*la.GPU) (err error) {
	var contenders []measure.Contender
	var names []string
	for _, g := range gpus {
		if len(g.Members()) > c.kvHeads {
			continue
		}
		r, err := newScaleRig(c, g)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, r.close()) }()
		name := "one GPU"
		if n := len(g.Members()); n > 1 {
			name = fmt.Sprintf("%d GPUs", n)
		}
		names = append(names, name)
		contenders = append(contenders, measure.Contender{Name: name, Run: r.replay})
	}
	all, err := measure.Alternate(s.pace, contenders)
	if err != nil {
		return err
	}
	for i, x := range all {
		row := s.report.Row(tableScale, c.String(), names[i])
		seconds := x.Median() / float64(c.layers())
		row.Add(measure.LayerMicros, 1e6*seconds, nil)
		row.Add(measure.Speed, float64(c.Bytes())/seconds/1e9, nil)
		if i == 0 {
			continue
		}
		var bar *measure.Bar
		if names[i] == "2 GPUs" && c.two > 0 {
			bar = measure.AtLeast(c.two)
		}
		row.Add(measure.OverOneGPU, x.Faster(all[0]), bar)
	}
	return nil
}

// scaleRig is a recorded step of layers of attention.
type scaleRig struct {
	gpu       *la.GPU
	cache     *la.Cache
	step      *la.Step
	recording *la.Recording
}

func newScaleRig(c scaleCase, gpu *la.GPU) (r *scaleRig, err error) {
	r = &scaleRig{gpu: gpu}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	r.cache, err = la.NewCache(la.CacheConfig{Layers: c.layers(), KVHeads: c.kvHeads, HeadDim: c.dim, DType: la.Float16,
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
	run, err := r.nodes(r.step, c.batch(), c.heads, c)
	if err != nil {
		return r, err
	}
	if err := r.step.Set(appends); err != nil {
		return r, err
	}
	if err := run(); err != nil { // nodes have their memory
		return r, err
	}
	r.recording, err = gpu.Record(run)
	return r, err
}

// nodes are layers of a step on numbers that are on the GPU, and run them.
func (r *scaleRig) nodes(step *la.Step, rows, heads int, c scaleCase) (run func() error, err error) {
	g := G.NewGraph()
	var nodes [3]*G.Node
	var in []G.Value
	for i, h := range []int{heads, c.kvHeads, c.kvHeads} {
		x := make([]la.F16, rows*h*c.dim)
		for j := range x {
			x[j] = half.FromFloat32(float32(j*7919%1000)/500 - 1)
		}
		d, err := r.gpu.Upload(tensor.New(tensor.WithShape(rows, h*c.dim), tensor.WithBacking(x)))
		if err != nil {
			return nil, err
		}
		nodes[i] = G.NewMatrix(g, la.Float16, G.WithShape(rows, h*c.dim), G.WithName(fmt.Sprint("x", i)))
		in = append(in, d)
	}
	var ops []G.Op
	for l := range c.layers() {
		n, err := la.CachedAttention(nodes[0], nodes[1], nodes[2], step.Layer(l), la.WithCausal())
		if err != nil {
			return nil, err
		}
		ops = append(ops, n.Op())
	}
	return func() error {
		for _, op := range ops {
			if _, err := op.Do(in...); err != nil {
				return err
			}
		}
		return nil
	}, nil
}

// prompts gives every sequence all tokens but the last, in steps, through as few query heads
// as there can be.
func (r *scaleRig) prompts(c scaleCase, appends []la.Append) error {
	rows := int(min(scaleChunk, c.keys()))
	step, err := r.cache.NewStep(rows)
	if err != nil {
		return err
	}
	run, err := r.nodes(step, rows, c.kvHeads, c)
	if err != nil {
		return err
	}
	var all []la.Append
	for i, a := range appends {
		all = append(all, la.Append{Seq: a.Seq, Tokens: c.lengths[i] - 1})
	}
	for chunk := range la.Chunks(rows, all) {
		if err := step.Set(chunk); err != nil {
			return err
		}
		if err := run(); err != nil {
			return errors.Join(err, step.Rollback())
		}
		if err := step.Commit(); err != nil {
			return err
		}
	}
	return r.gpu.Synchronize()
}

// replay is n steps, from the first being queued to the last being done.
func (r *scaleRig) replay(n int) (time.Duration, error) {
	began := time.Now()
	for range n {
		if err := r.recording.Replay(); err != nil {
			return 0, err
		}
	}
	err := r.gpu.Synchronize()
	return time.Since(began), err
}

func (r *scaleRig) close() (err error) {
	err = r.recording.Close()
	if r.step != nil {
		err = errors.Join(err, r.step.Rollback())
	}
	if r.cache != nil {
		err = errors.Join(err, r.cache.Close())
	}
	return err
}
