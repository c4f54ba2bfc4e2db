package e2e

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// promptCase is a batch of prompts of equal length.
type promptCase struct {
	shape        shape
	batch, width int
	bar          *measure.Bar // speedup over transformers, in mixed precision
}

func (c promptCase) String() string { return fmt.Sprintf("%d x %d tokens", c.batch, c.width) }

func (c promptCase) table() string { return fmt.Sprintf("Prompts of %v in float16", c.shape) }

const (
	nameMixed        = "lean, mixed precision"
	nameTransformers = "transformers"
	promptShape      = longShape
)

// promptCases parses -prompts, a comma-separated list of BATCHxTOKENS.
func (o *e2eGPUOptions) promptCases() (all []promptCase, err error) {
	texts := measure.Fields(o.prompts)
	if len(texts) == 0 {
		return nil, nil
	}
	for _, name := range strings.Split(o.shapes, ",") {
		first, positions := len(all), 0
		for _, text := range texts {
			var c promptCase
			if n, err := fmt.Sscanf(text, "%dx%d", &c.batch, &c.width); n != 2 || err != nil || c.batch < 1 || c.width < 1 || fmt.Sprintf("%dx%d", c.batch, c.width) != text {
				return nil, fmt.Errorf("-prompts: %q is not a number of prompts and their tokens, such as 16x512", text)
			}
			c.bar = measure.Only(name == promptShape, measure.AtLeast(0.85))
			positions = max(positions, c.width)
			all = append(all, c)
		}
		s, err := shapeNamed(name, positions)
		if err != nil {
			return nil, err
		}
		for i := first; i < len(all); i++ {
			all[i].shape = s
		}
	}
	return all, nil
}

// measurePrompts measures cases of one model.
func (b *e2eGPU) measurePrompts(cases []promptCase) (err error) {
	s := cases[0].shape
	fmt.Fprintf(b.Stderr, "%v: making weights\n", s)
	ours, err := openGPU(s, b.chunk)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ours.close()) }()
	if err := ours.check(); err != nil {
		return err
	}
	if err := b.theirs(s); err != nil {
		return err
	}
	for _, c := range cases {
		if err := b.measurePrompt(c, ours); err != nil {
			return fmt.Errorf("%v: %w", c, err)
		}
		if err := b.save(); err != nil {
			return err
		}
	}
	return nil
}

func (b *e2eGPU) measurePrompt(c promptCase, ours decoder) (err error) {
	var contenders []measure.Contender
	add := func(name string, read func() (time.Duration, error)) {
		contenders = append(contenders, measure.Contender{Name: name, Run: func(steps int) (total time.Duration, err error) {
			fmt.Fprintf(b.Stderr, "%v, %v: %s\n", c.shape, c, name)
			for range steps {
				t, err := read()
				if err != nil {
					return 0, err
				}
				total += t
			}
			return total, nil
		}})
	}
	for _, way := range []struct {
		name  string
		mixed bool
	}{{nameLean16, false}, {nameMixed, true}} {
		r := ours.reading(way.mixed)
		defer func() { err = errors.Join(err, r.close()) }()
		first, err := r.read(c.batch, c.width)
		if err != nil {
			return err
		}
		add(way.name, func() (time.Duration, error) { return r.read(c.batch, c.width) })
		b.Report.Row(c.table(), c.String(), way.name).Add(measure.FirstPrompt, 1e3*first.Seconds(), nil)
	}
	if b.worker != nil {
		add(nameTransformers, func() (time.Duration, error) {
			t, _, err := b.worker.Seconds(1, "prompt %d %d", c.batch, c.width)
			if err != nil {
				return 0, b.kept(err)
			}
			return t[0], nil
		})
	}
	all, err := measure.Alternate(measure.Pace{Rounds: b.rounds, Steps: 2}, contenders)
	if err != nil {
		return err
	}
	b.judgePrompts(c, contenders, all)
	return nil
}

// judgePrompts adds the figures of a case. The peer is the last contender.
func (b *e2eGPU) judgePrompts(c promptCase, contenders []measure.Contender, all []measure.Samples) {
	var peer measure.Samples
	if last := len(all) - 1; contenders[last].Name == nameTransformers {
		peer = all[last]
	}
	for i, t := range all {
		r := b.Report.Row(c.table(), c.String(), contenders[i].Name)
		r.Add(measure.PromptMillis, 1e3*t.Median(), nil)
		r.Add(measure.Prompt, float64(c.batch*c.width)/t.Median(), nil)
		if name := contenders[i].Name; peer != nil && name != nameTransformers {
			r.Add(measure.OverHF, t.Faster(peer), measure.Only(name == nameMixed, c.bar))
		}
	}
}
