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
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/examples/opt/model"
)

// Decode steps of whole models on several GPUs, and by several processes: a part of the scale command.

// modelCase is steps of a batch, or prompts, and how many times as fast two GPUs should be, of one process or of two ranks; 0:
// nobody says.
type modelCase struct {
	batch, context int
	two, ranks     float64
	prompt         bool // the prompts are measured, and not the steps behind them
}

// modelScaling is a model with random weights and its cases.
type modelScaling struct {
	shape  string
	config hf.Config
	steps  int // of a turn
	cases  []modelCase
	long   bool            // too long for -quick
	bytes  map[int]float64 // by GPUs, how many times as fast a step should be as one GPU reads what it has to
}

// readSpeed is a variable for tests.
var readSpeed = gpu.ReadSpeed

// scaledModels are one that fits on a GPU, and one of 60 GB that fits on some alone, and whose cache may take another 60.
var scaledModels = []modelScaling{
	{longShape, optShapes[longShape], 20, []modelCase{{batch: 1, context: 1024, two: 1.8}, {batch: 16, context: 1024, two: 1.7, ranks: 1.4}, {batch: 1, context: 2048, two: 1.6, prompt: true}, {batch: 1, context: 32768, two: 1.85}}, false, nil},
	{"30b", optShape(48, 7168, 56), 20, []modelCase{{batch: 1, context: 1024}, {batch: 16, context: 1024}, {batch: 8, context: 5400}}, true, map[int]float64{4: 3.2, 8: 5.5}},
}

// scaleModels is the part of the scale command.
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

// measure has all numbers of GPUs take turns. One that has too little memory for the model is left out.
func (m *modelScaling) measure(x *gpu.Scaled) (err error) {
	config := m.config
	asked := false
	for _, c := range m.cases {
		config.MaxPositions = max(config.MaxPositions, c.context+m.steps)
		asked = asked || x.Match(m.name(c))
	}
	if !asked {
		return nil
	}
	fmt.Fprintf(x.Stderr, "OPT-%s: making weights\n", m.shape)
	weights, err := model.Load(newRandomModel(config))
	if err != nil {
		return err
	}
	sets, err := rankSets(x, config)
	if err != nil {
		return err
	}
	type turn struct {
		gpus []*device.GPU
		sets []*rankSet
	}
	turns := []turn{{x.GPUs, sets}}
	if m.long { // what one number of GPUs has leaves no memory for others: one behind the other
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
		if err := m.measureOn(x, t.gpus, t.sets, weights); err != nil {
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

// compare has the figures of those that did not take turns, by their names and numbers of GPUs: to one GPU, where it had the
// memory, and to the time that it takes to read what a step does, at bytes a second; 0: nobody knows.
func (m *modelScaling) compare(x *gpu.Scaled, names map[string]int, speed float64) {
	for _, c := range m.cases {
		step := stepCase{shape: optModel{m.shape, m.config}, batch: c.batch, context: c.context, steps: m.steps}
		one := 0.0 // it lacks the memory
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

// measureOn has numbers of GPUs, and ranks, take turns.
func (m *modelScaling) measureOn(x *gpu.Scaled, gpus []*device.GPU, sets []*rankSet, weights *model.Weights) (err error) {
	// GPUs of its own give the weights' memory back when they are closed.
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

// stepper is who has a model on one GPU, or several, or is ranks.
type stepper interface {
	read(batch, context, steps int) error
	decode(batch, context, steps int) (prompt, steady time.Duration, ids []string, err error)
	again(times int) (time.Duration, error)
	rest() error // gives back what a case has taken
}

func (e *leanEngine) rest() error { return e.close() }

// scaled is one of those that take turns.
type scaled struct {
	stepper
	name  string
	gpus  int
	least float64 // how many times as fast as one GPU it should be; 0: nobody says
}

func (m *modelScaling) measureCase(x *gpu.Scaled, sets []*rankSet, weights *model.Weights, c modelCase) (err error) {
	var all []scaled
	for _, g := range x.GPUs {
		e := &leanEngine{weights: weights, options: greedy(model.Options{Device: g, Cache: la.Float16}), done: func() error { return nil }}
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
			// Random weights leave small margins, and several GPUs add in another order.
			fmt.Fprintf(x.Stderr, "%s: %s goes on with other tokens than one GPU\n", m.name(c), s.name)
		}
	}
	return nil
}
