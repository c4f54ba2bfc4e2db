package main

import (
	"fmt"
	"math/rand/v2"
	"slices"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/nn"
)

// run does one step: ids are the tokens of the appends, one behind the other. It returns the next token of each append.
func (m *model) run(appends []la.Append, ids []int, choice nn.Choice, random *rand.Rand) (next []int32, err error) {
	err = m.step.Run(appends, func() error {
		copy(m.tokens, ids)
		for row, position := range m.step.Positions() {
			m.positions[row] = position + positionOffset
		}
		copy(m.last, m.step.Last())
		choices, randoms := make([]nn.Choice, len(m.last)), make([]float64, len(m.last))
		for i := range choices {
			choices[i], randoms[i] = choice, random.Float64()
		}
		copy(m.choices.Data().([]int32), nn.Choices(choices).Data().([]int32))
		copy(m.randoms.Data().([]int32), nn.Randoms(randoms).Data().([]int32))
		defer m.machine.Reset()
		if err := la.Cause(m.machine.RunAll()); err != nil {
			return err
		}
		next = append(next, m.next.Value().Data().([]int32)[:len(appends)]...)
		return nil
	})
	return next, err
}

// text is a prompt and how it goes on.
type text struct {
	seq    *la.Sequence
	tokens []int
}

// generate goes on with each prompt until end comes, there are most new tokens, or the model has no more positions.
func (m *model) generate(prompts [][]int, most, end int, choice nn.Choice, seed uint64) (ids [][]int, err error) {
	var texts []*text
	for i, p := range prompts {
		if len(p) == 0 || len(p) > m.sizes.Context {
			return nil, fmt.Errorf("prompt %d has %d tokens, not 1 to %d", i, len(p), m.sizes.Context)
		}
		seq, err := m.cache.NewSequence()
		if err != nil {
			return nil, err
		}
		defer seq.Release()
		texts = append(texts, &text{seq, slices.Clone(p)})
	}
	random := rand.New(rand.NewPCG(seed, 0))
	for live := slices.Clone(texts); most > 0 && len(live) > 0; most-- {
		if err := m.extend(live, choice, random); err != nil {
			return nil, err
		}
		live = slices.DeleteFunc(live, func(t *text) bool { return t.tokens[len(t.tokens)-1] == end || len(t.tokens) > m.sizes.Context })
	}
	for i, t := range texts {
		ids = append(ids, t.tokens[len(prompts[i]):])
	}
	return ids, nil
}

// extend reads what is new of each text, in as many steps as that takes, and adds one token to each.
func (m *model) extend(texts []*text, choice nn.Choice, random *rand.Rand) error {
	todo := make([]la.Append, len(texts))
	for i, t := range texts {
		todo[i] = la.Append{Seq: t.seq, Tokens: len(t.tokens) - t.seq.Len()}
	}
	for appends, of := range la.Chunks(m.step.Tokens(), todo) {
		var ids []int
		for i, a := range appends {
			ids = append(ids, texts[of[i]].tokens[a.Seq.Len():][:a.Tokens]...)
		}
		next, err := m.run(appends, ids, choice, random)
		if err != nil {
			return err
		}
		for i, a := range appends {
			if t := texts[of[i]]; a.Seq.Len() == len(t.tokens) { // all of it is read
				t.tokens = append(t.tokens, int(next[i]))
			}
		}
	}
	return nil
}
