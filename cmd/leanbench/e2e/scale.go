package e2e

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"gorgonia.org/leanattention/cmd/leanbench/gpu"
	"gorgonia.org/leanattention/cmd/leanbench/measure"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/examples/opt/model"
)

// Decode steps of whole models on several GPUs: a part of the scale command.

// modelCase is steps of a batch, or prompts, and how many times as fast two GPUs should be; 0: nobody says.
type modelCase struct {
	batch, context int
	two            float64
	prompt         bool // the prompts are measured, and not the steps behind them
}

// modelScaling is a model with random weights and its cases.
type modelScaling struct {
	shape  string
	config hf.Config
	steps  int // of a turn
	cases  []modelCase
	long   bool // too long for -quick
}

// scaledModels are one that fits on a GPU, and one of 60 GB whose cache takes another 60.
var scaledModels = []modelScaling{
	{longShape, optShapes[longShape], 20, []modelCase{{batch: 1, context: 1024, two: 1.8}, {batch: 16, context: 1024, two: 1.7}, {batch: 1, context: 2048, two: 1.6, prompt: true}, {batch: 1, context: 32768, two: 1.85}}, false},
	{"30b", optShape(48, 7168, 56), 20, []modelCase{{batch: 8, context: 5400}}, true},
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
	turns := [][]*la.GPU{x.GPUs}
	if m.long { // what one number of GPUs has leaves no memory for others: one behind the other
		turns = nil
		for i := range x.GPUs {
			turns = append(turns, x.GPUs[i:i+1])
		}
	}
	for _, gpus := range turns {
		if err := m.measureOn(x, gpus, weights); err != nil {
			return err
		}
	}
	for _, c := range m.cases {
		for _, g := range x.GPUs {
			one, y := x.Report.Find(m.name(c), "one GPU", measure.StepMillis), x.Report.Find(m.name(c), x.Name(g), measure.StepMillis)
			if m.long && one != nil && y != nil && y != one {
				x.Report.Row(m.table(), m.name(c), x.Name(g)).Add(measure.OverOneGPU, one.Value/y.Value, nil)
			}
		}
	}
	x.Report.WriteTable(x.Stdout, m.table())
	x.Report.WriteTable(x.Stdout, m.promptTable())
	return nil
}

// measureOn has numbers of GPUs take turns.
func (m *modelScaling) measureOn(x *gpu.Scaled, gpus []*la.GPU, weights *model.Weights) (err error) {
	// GPUs of its own give the weights' memory back when they are closed.
	mine := *x
	mine.GPUs = nil
	defer func() {
		for _, g := range mine.GPUs {
			err = errors.Join(err, g.Close())
		}
	}()
	for _, g := range gpus {
		var ordinals []int
		for _, i := range g.Members() {
			ordinals = append(ordinals, i.Ordinal)
		}
		g, err := la.OpenGPUs(ordinals...)
		if err != nil {
			return err
		}
		mine.GPUs = append(mine.GPUs, g)
	}
	for _, c := range m.cases {
		if !x.Match(m.name(c)) {
			continue
		}
		if err := m.measureCase(&mine, weights, c); err != nil {
			return fmt.Errorf("%s: %w", m.name(c), err)
		}
	}
	return nil
}

func (m *modelScaling) measureCase(x *gpu.Scaled, weights *model.Weights, c modelCase) (err error) {
	var contenders []measure.Contender
	var of []*la.GPU
	texts := make(map[string]string)
	for _, g := range x.GPUs {
		name := x.Name(g)
		e := &leanEngine{weights: weights, options: greedy(model.Options{Device: g, Cache: la.Float16}), done: func() error { return nil }}
		defer func() { err = errors.Join(err, e.close()) }()
		if err := e.read(c.batch, c.context, m.steps); errors.Is(err, la.ErrOutOfMemory) || errors.Is(err, la.ErrUnsupported) {
			fmt.Fprintf(x.Stderr, "%s: %s: left out: %v\n", m.name(c), name, err)
			continue
		} else if err != nil {
			return err
		}
		of = append(of, g)
		contenders = append(contenders, measure.Contender{Name: name, Run: func(steps int) (time.Duration, error) {
			fmt.Fprintf(x.Stderr, "%s: %s\n", m.name(c), name)
			if c.prompt {
				return e.again(steps)
			}
			_, steady, ids, err := e.decode(c.batch, c.context, steps)
			texts[name] = strings.Join(ids, " ")
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
	all, err := measure.Alternate(pace, contenders)
	if err != nil {
		return err
	}
	for i, y := range all {
		name := contenders[i].Name
		row := x.Report.Row(table, m.name(c), name)
		row.Add(metric, 1e3*y.Median(), nil)
		if len(of[0].Members()) > 1 || i == 0 {
			continue
		}
		row.Add(measure.OverOneGPU, y.Faster(all[0]), measure.Only(len(of[i].Members()) == 2 && c.two > 0, measure.AtLeast(c.two)))
		if texts[name] != texts[contenders[0].Name] {
			// Random weights leave small margins, and several GPUs add in another order.
			fmt.Fprintf(x.Stderr, "%s: %s goes on with other tokens than one GPU\n", m.name(c), name)
		}
	}
	return nil
}
