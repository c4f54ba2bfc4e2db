package main

import (
	"fmt"
	"math/rand/v2"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/nn"
)

// run does one step: ids are the tokens of the appends, one behind the other. It
// returns the next token of each append.
func (d *decoder) run(appends []la.Append, ids []int, choice nn.Choice, random *rand.Rand) (next []int32, err error) {
	err = d.step.Run(appends, func() error {
		copy(d.tokens, ids)
		for row, position := range d.step.Positions() {
			d.positions[row] = position + hf.PositionOffset
		}
		copy(d.last, d.step.Last())

		choices, randoms := make([]nn.Choice, len(d.last)), make([]float64, len(d.last))
		for i := range choices {
			choices[i], randoms[i] = choice, random.Float64()
		}
		copy(d.choices.Data().([]int32), nn.Choices(choices).Data().([]int32))
		copy(d.randoms.Data().([]int32), nn.Randoms(randoms).Data().([]int32))

		defer d.machine.Reset()
		if err := la.Cause(d.machine.RunAll()); err != nil {
			return err
		}
		next = append(next, d.next.Value().Data().([]int32)[:len(appends)]...)
		return nil
	})
	return next, err
}

// text is a prompt and how it goes on.
type text struct {
	seq    *la.Sequence
	tokens []int
	read   int // tokens that are in the cache
}

// generate goes on with each prompt until end comes or there are most new tokens.
func (d *decoder) generate(prompts [][]int, most, end int, choice nn.Choice, seed uint64) ([][]int, error) {
	if len(prompts) > len(d.last) {
		return nil, fmt.Errorf("%d prompts, and the graph is for %d", len(prompts), len(d.last))
	}
	texts := make([]*text, len(prompts))
	for i, p := range prompts {
		if len(p) == 0 {
			return nil, fmt.Errorf("prompt %d has no tokens", i)
		}
		seq, err := d.cache.NewSequence()
		if err != nil {
			return nil, err
		}
		defer seq.Release()
		texts[i] = &text{seq: seq, tokens: append([]int(nil), p...)}
	}
	random := rand.New(rand.NewPCG(seed, 0))
	live := texts
	for n := 0; n < most && len(live) > 0; n++ {
		if err := d.extend(live, choice, random); err != nil {
			return nil, err
		}
		var still []*text
		for _, t := range live {
			if t.tokens[len(t.tokens)-1] != end {
				still = append(still, t)
			}
		}
		live = still
	}
	ids := make([][]int, len(texts))
	for i, t := range texts {
		ids[i] = t.tokens[len(prompts[i]):]
	}
	return ids, nil
}

// extend reads what is new of each text, in as many steps as that takes, and adds
// one token to each.
func (d *decoder) extend(texts []*text, choice nn.Choice, random *rand.Rand) error {
	todo := make([]la.Append, len(texts))
	for i, t := range texts {
		todo[i] = la.Append{Seq: t.seq, Tokens: len(t.tokens) - t.read}
	}
	for appends, of := range la.Chunks(d.step.Tokens(), todo) {
		var ids []int
		for i, a := range appends {
			t := texts[of[i]]
			ids = append(ids, t.tokens[t.read:t.read+a.Tokens]...)
		}
		next, err := d.run(appends, ids, choice, random)
		if err != nil {
			return err
		}
		for i, a := range appends {
			t := texts[of[i]]
			if t.read += a.Tokens; t.read == len(t.tokens) { // all of it is read
				t.tokens = append(t.tokens, int(next[i]))
			}
		}
	}
	return nil
}
