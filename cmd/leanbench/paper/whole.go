package paper

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"gorgonia.org/leanattention/cmd/leanbench/e2e"
	"gorgonia.org/leanattention/cmd/leanbench/measure"

	la "gorgonia.org/leanattention"
)

// wholeDecoder is an e2e.Whole.
type wholeDecoder interface {
	Measure(prompt, tokens int) ([]e2e.WholeTime, error)
	Said() (hello string, without []string)
	Close() error
}

// openWhole is a variable for tests, which have another decoder.
var openWhole = func(model string, longest int, python string, peers bool, rounds int, stderr io.Writer) (wholeDecoder, error) {
	return e2e.OpenWhole(model, longest, python, peers, rounds, stderr)
}

// measureWhole has a whole decoder read a prompt and add an eighth as many tokens.
func (b *gpuBench) measureWhole(p panel, x point) error {
	if err := b.openWhole(p); err != nil {
		return leftOut("%v", err)
	}
	prompt := x.lengths[0]
	tokens := prompt / 8
	all, err := b.whole.Measure(prompt, tokens)
	if errors.Is(err, la.ErrOutOfMemory) {
		b.Note("%s, %s is left out: %v", p.table, x.label, err)
		fmt.Fprintf(b.Stderr, "%s is left out: %v\n", x.label, err)
		return nil
	} else if err != nil {
		return err
	}
	total := make(map[string]measure.Samples)
	for _, t := range all {
		r := b.Report.Row(p.table, x.label, t.Name)
		if len(t.Prompt) > 0 {
			r.Add(measure.PromptMillis, 1e3*t.Prompt.Median(), nil)
		}
		r.Add(measure.StepMillis, 1e3*t.Step.Median(), nil)
		if len(t.Prompt) == 0 {
			continue
		}
		sum := make(measure.Samples, len(t.Step))
		for i := range sum {
			sum[i] = t.Prompt[i] + float64(tokens)*t.Step[i]
		}
		total[t.Name] = sum
		r.Add(measure.TotalSeconds, sum.Median(), nil)
	}
	row, ours := b.Report.Row(p.table, x.label, e2e.WholeLean), total[e2e.WholeLean]
	for _, c := range []struct {
		metric measure.Metric
		name   string
	}{{measure.OverFixed, e2e.WholeFixed}, {measure.OverCompiled, e2e.WholeTorch}} {
		if other := total[c.name]; other != nil {
			row.Add(c.metric, ours.Faster(other), nil)
		}
	}
	_, without := b.whole.Said()
	for _, why := range without {
		b.Note("%s: without transformers: %s", p.table, why)
	}
	return nil
}

// openWhole makes the decoder of a panel. Before that the memory of other figures is given back.
func (b *gpuBench) openWhole(p panel) error {
	if b.wholeOf == p.id {
		return b.noWhole
	}
	b.wholeOf = p.id
	if b.noWhole = b.closeWhole(); b.noWhole == nil {
		b.noWhole = b.Arenas(nil)
	}
	if b.noWhole != nil {
		return b.noWhole
	}
	longest, model := 0, p.gpu[0].model
	for _, x := range p.gpu {
		longest = max(longest, x.lengths[0]/8*9+1)
	}
	whole, err := openWhole(model, longest, b.Options.Python, b.Options.Peers, wholeRounds, b.Stderr)
	if b.noWhole = err; err != nil {
		return err
	}
	b.whole = whole
	hello, without := whole.Said()
	for _, why := range without {
		b.Note("%s: without transformers: %s", p.table, why)
	}
	if words := strings.Fields(hello); len(words) > 1 {
		b.Note("%s", hello)
		b.Report.Versions[words[0]] = strings.TrimSuffix(words[1], ",")
	}
	return nil
}

func (b *gpuBench) closeWhole() error {
	w := b.whole
	if b.whole = nil; w == nil {
		return nil
	}
	return w.Close()
}

const wholeRounds = 3
