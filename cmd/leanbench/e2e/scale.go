package e2e

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/cmd/leanbench/gpu"
	"gorgonia.org/leanattention/cmd/leanbench/measure"

	la "gorgonia.org/leanattention"
	lean "gorgonia.org/leanattention/decoder"
)

// Decode steps of whole models on several GPUs and in several processes, which are part of the scale command.

// modelCase is a batch of decode steps or of prompts. two is the bar of the speedup of two GPUs in one
// process, and ranks the bar of two ranks. 0 means no bar.
type modelCase struct {
	batch, context int
	two, ranks     float64
	prompt         bool // measures the prompts instead of the steps after them
}

// modelScaling is a model with random weights and its cases.
type modelScaling struct {
	shape string
	of    shape
	steps int // steps per turn
	cases []modelCase
	long  bool            // too long for -quick
	bytes map[int]float64 // bar by number of GPUs: speedup of a step over the time in which one GPU reads the bytes of a step
}

// readSpeed measures a GPU's read speed. Tests replace it.
var readSpeed = gpu.ReadSpeed

// scaledModels are a model that fits on one GPU, and a model of 60 GB whose cache may need another 60 GB.
var scaledModels = []modelScaling{
	{longShape, optShapes[longShape], 20, []modelCase{{batch: 1, context: 1024, two: 1.8}, {batch: 16, context: 1024, two: 1.7, ranks: 1.4}, {batch: 1, context: 2048, two: 1.6, prompt: true}, {batch: 1, context: 32768, two: 1.85}}, false, nil},
	{"30b", newOPT("30b", 48, 7168, 56), 20, []modelCase{{batch: 1, context: 1024}, {batch: 16, context: 1024}, {batch: 8, context: 5400}}, true, map[int]float64{4: 3.2, 8: 5.5}},
}

// scaleModels is the part of the scale command that measures models.
func scaleModels(x *gpu.Scaled) error {
	for _, m := range scaledModels {
		if m.long && x.Quick {
			continue
		}
		if err := m.measure(x); err != nil {
			return err
		}
	}
	return nil
}

func (m *modelScaling) table() string {
	return fmt.Sprintf("A decode step of OPT-%s in float16 on several GPUs: linear layers by output and by input features in turn, the cache by heads", m.shape)
}

func (m *modelScaling) promptTable() string {
	return fmt.Sprintf("A prompt of OPT-%s in float16 on several GPUs", m.shape)
}

func (m *modelScaling) name(c modelCase) string {
	if c.prompt {
		return fmt.Sprintf("OPT-%s, b%d, %d tokens", m.shape, c.batch, c.context)
	}
	return fmt.Sprintf("OPT-%s, b%d, behind %d tokens", m.shape, c.batch, c.context)
}

// measure measures the cases on each number of GPUs, in alternation. A number of GPUs with too little memory
// for the model is left out.
func (m *modelScaling) measure(x *gpu.Scaled) (err error) {
	s := m.of
	asked := false
	for _, c := range m.cases {
		s = s.withPositions(c.context + m.steps)
		asked = asked || x.Match(m.name(c))
	}
	if !asked {
		return nil
	}
	fmt.Fprintf(x.Stderr, "OPT-%s: making weights\n", m.shape)
	e, err := newLean(s, nil, 0)
	if err != nil {
		return err
	}
	sets, err := rankSets(x, s)
	if err != nil {
		return err
	}
	type turn struct {
		gpus []*device.GPU
		sets []*rankSet
	}
	turns := []turn{{x.GPUs, sets}}
	if m.long { // a large model fits in memory only once, so the numbers of GPUs run one after the other
		turns = nil
		for i := range x.GPUs {
			turns = append(turns, turn{gpus: x.GPUs[i : i+1]})
		}
		for i := range sets {
			turns = append(turns, turn{sets: sets[i : i+1]})
		}
	}
	speed := 0.0
	if m.long {
		if speed, err = readSpeed(); err != nil {
			fmt.Fprintf(x.Stderr, "%s: nothing is compared with what one GPU reads: %v\n", m.table(), err)
		}
	}
	for _, t := range turns {
		if err := m.measureOn(x, t.gpus, t.sets, e); err != nil {
			return err
		}
		if !m.long {
			continue
		}
		names := make(map[string]int)
		for _, g := range t.gpus {
			names[x.Name(g)] = len(g.Members())
		}
		for _, s := range t.sets {
			names[s.String()] = s.Size * s.GPUs
		}
		m.compare(x, names, speed)
		if err := x.Save(); err != nil {
			return err
		}
	}
	x.Report.WriteTable(x.Stdout, m.table())
	x.Report.WriteTable(x.Stdout, m.promptTable())
	return nil
}

// compare adds the figures that relate contenders which did not alternate. names maps each contender to its
// number of GPUs. The figures compare with one GPU, if the model fits on one, and with the time to read a
// step's bytes at speed, in bytes per second. If speed is 0, the second comparison is left out.
func (m *modelScaling) compare(x *gpu.Scaled, names map[string]int, speed float64) {
	for _, c := range m.cases {
		step := stepCase{shape: m.of, batch: c.batch, context: c.context, steps: m.steps}
		one := 0.0 // 0: one GPU has too little memory
		if f := x.Report.Find(m.name(c), "one GPU", measure.StepMillis); f != nil {
			one = f.Value
		}
		for _, name := range slices.Sorted(maps.Keys(names)) {
			y := x.Report.Find(m.name(c), name, measure.StepMillis)
			if y == nil || c.prompt {
				continue
			}
			row, millis := x.Report.Row(m.table(), m.name(c), name), y.Value
			if one > 0 && names[name] > 1 {
				row.Add(measure.OverOneGPU, one/millis, nil)
			}
			if speed > 0 {
				least := m.bytes[names[name]]
				row.Add(measure.OverBytes, 1e3*step.bytes()/speed/millis, measure.Only(least > 0, measure.AtLeast(least)))
			}
		}
	}
}

// measureOn measures the cases on the given GPUs and ranks, in alternation.
func (m *modelScaling) measureOn(x *gpu.Scaled, gpus []*device.GPU, sets []*rankSet, weights *leanEngine) (err error) {
	// Closing these GPUs, which only this function uses, frees the memory of the weights.
	mine := *x
	mine.GPUs = nil
	defer func() {
		for _, g := range mine.GPUs {
			err = errors.Join(err, g.Close())
		}
		for _, s := range sets {
			err = errors.Join(err, s.close())
		}
	}()
	for _, g := range gpus {
		var ordinals []int
		for _, i := range g.Members() {
			ordinals = append(ordinals, i.Ordinal)
		}
		g, err := device.Open(ordinals...)
		if err != nil {
			return err
		}
		mine.GPUs = append(mine.GPUs, g)
	}
	for _, c := range m.cases {
		if !x.Match(m.name(c)) {
			continue
		}
		if err := m.measureCase(&mine, sets, weights, c); err != nil {
			return fmt.Errorf("%s: %w", m.name(c), err)
		}
		if err := x.Save(); err != nil {
			return err
		}
	}
	return nil
}

// stepper is a model on one GPU, on several GPUs, or on ranks.
type stepper interface {
	read(batch, context, steps int) error
	decode(batch, context, steps int) (prompt, steady time.Duration, ids []string, err error)
	again(times int) (time.Duration, error)
	rest() error // releases the memory of a case
}

// scaled is a contender of a case.
type scaled struct {
	stepper
	name  string
	gpus  int
	least float64 // bar of the speedup over one GPU; 0: none
}

func (m *modelScaling) measureCase(x *gpu.Scaled, sets []*rankSet, weights *leanEngine, c modelCase) (err error) {
	var all []scaled
	for _, g := range x.GPUs {
		e := weights.with(func(o *lean.Options) { o.Device = g })
		s := scaled{stepper: e, name: x.Name(g), gpus: len(g.Members())}
		if s.gpus == 2 {
			s.least = c.two
		}
		all = append(all, s)
	}
	for _, set := range sets {
		s := scaled{stepper: set, name: set.String(), gpus: set.Size * set.GPUs}
		if s.gpus == 2 {
			s.least = c.ranks
		}
		all = append(all, s)
	}
	var contenders []measure.Contender
	var of []scaled
	texts := make(map[string]string)
	for _, s := range all {
		defer func() { err = errors.Join(err, s.rest()) }()
		if err := s.read(c.batch, c.context, m.steps); errors.Is(err, la.ErrOutOfMemory) || errors.Is(err, la.ErrUnsupported) || errors.As(err, new(leftOut)) {
			fmt.Fprintf(x.Stderr, "%s: %s: left out: %v\n", m.name(c), s.name, err)
			continue
		} else if err != nil {
			return err
		}
		of = append(of, s)
		contenders = append(contenders, measure.Contender{Name: s.name, Run: func(steps int) (time.Duration, error) {
			fmt.Fprintf(x.Stderr, "%s: %s\n", m.name(c), s.name)
			if c.prompt {
				return s.again(steps)
			}
			_, steady, ids, err := s.decode(c.batch, c.context, steps)
			texts[s.name] = strings.Join(ids, " ")
			return steady, err
		}})
	}
	if len(contenders) == 0 {
		return nil
	}
	pace, table, metric := measure.Pace{Rounds: x.Rounds, Steps: m.steps}, m.table(), measure.StepMillis
	if c.prompt {
		pace.Steps, table, metric = 1, m.promptTable(), measure.PromptMillis
	}
	samples, err := measure.Alternate(pace, contenders)
	if err != nil {
		return err
	}
	for i, y := range samples {
		s := &of[i]
		if set, ok := s.stepper.(*rankSet); ok {
			if x.Report.Versions == nil {
				x.Report.Versions = make(map[string]string)
			}
			x.Report.Versions["NCCL"] = set.nccl
		}
		row := x.Report.Row(table, m.name(c), s.name)
		row.Add(metric, 1e3*y.Median(), nil)
		if of[0].gpus > 1 || i == 0 {
			continue
		}
		row.Add(measure.OverOneGPU, y.Faster(samples[0]), measure.Only(s.least > 0, measure.AtLeast(s.least)))
		if texts[s.name] != texts[of[0].name] {
			// Several GPUs sum in another order than one GPU, and with random weights the best tokens are
			// almost equally likely. Different tokens are therefore no error.
			fmt.Fprintf(x.Stderr, "%s: %s goes on with other tokens than one GPU\n", m.name(c), s.name)
		}
	}
	return nil
}
