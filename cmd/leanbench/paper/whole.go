package paper

import (
	"strings"

	"gorgonia.org/leanattention/cmd/leanbench/e2e"
	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// measureWhole has a whole decoder read a prompt and add an eighth as many tokens.
func (b *gpuBench) measureWhole(p panel, x point) error {
	if err := b.openWhole(p); err != nil {
		return leftOut("%v", err)
	}
	prompt := x.lengths[0]
	tokens := prompt / 8
	all, err := b.whole.Measure(prompt, tokens)
	if err != nil {
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
	if why := b.whole.Without; why != "" {
		b.Note("%s: without transformers: %s", p.table, why)
		b.whole.Without = ""
	}
	return nil
}

// openWhole makes the decoder, once: before that the memory of other figures is given back.
func (b *gpuBench) openWhole(p panel) error {
	if b.whole != nil || b.noWhole != nil {
		return b.noWhole
	}
	if b.noWhole = b.Arenas(nil); b.noWhole != nil {
		return b.noWhole
	}
	longest := 0
	for _, x := range p.gpu {
		longest = max(longest, x.lengths[0]/8*9+1)
	}
	b.whole, b.noWhole = e2e.OpenWhole(longest, b.Options.Python, b.Options.Peers, wholeRounds, b.Stderr)
	if b.noWhole != nil {
		b.whole = nil
		return b.noWhole
	}
	if hello := strings.Fields(b.whole.Hello); len(hello) > 1 {
		b.Note("%s", b.whole.Hello)
		b.Report.Versions[hello[0]] = strings.TrimSuffix(hello[1], ",")
	}
	return nil
}

const wholeRounds = 3
