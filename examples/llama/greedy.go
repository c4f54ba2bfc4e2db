package llama

import (
	"errors"
	"fmt"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"

	"gorgonia.org/tensor"
)

// Next is a step of a greedy decoder. It returns the most likely token after each token of each text. NaN or infinite
// logits are an error.
func (d *Decoder) Next(texts ...Text) (tokens [][]int, err error) {
	if !d.greedy {
		return nil, notGreedy()
	}
	all, err := d.run(texts)
	if err != nil {
		return nil, err
	}
	rows := all.([]int32)
	for _, t := range texts {
		own, err := chosen(rows[:len(t.IDs)])
		if err != nil {
			return nil, err
		}
		tokens, rows = append(tokens, own), rows[len(t.IDs):]
	}
	return tokens, nil
}

func notGreedy() error {
	return fmt.Errorf("llama: only a greedy decoder chooses tokens: %w", la.ErrOption)
}

// chosen returns the tokens that an ArgMax has chosen in a step, without unassigned rows.
func chosen(rows []int32) ([]int, error) {
	own := make([]int, len(rows))
	for i, id := range rows {
		if own[i] = int(id); id < 0 {
			return nil, fmt.Errorf("llama: logits of row %d of %d are NaN or infinite", i, len(rows))
		}
	}
	return own, nil
}

// Continue runs steps of a greedy decoder. The first step appends tokens, one to each sequence; each further step
// appends the tokens that the step before has chosen. Continue returns the tokens that each step chose. On a GPU the
// host waits for the last step only. After an error some steps may have been done: the lengths of the sequences show
// which.
func (d *Decoder) Continue(seqs []*la.Sequence, tokens []int, steps int) (all [][]int, err error) {
	switch {
	case !d.greedy:
		return nil, notGreedy()
	case len(seqs) == 0 || len(tokens) != len(seqs):
		return nil, fmt.Errorf("llama: %d tokens for %d sequences: %w", len(tokens), len(seqs), la.ErrShape)
	case steps < 1:
		return nil, fmt.Errorf("llama: %d steps: %w", steps, la.ErrOption)
	}
	if d.gpu != nil {
		return d.continueGPU(seqs, tokens, steps)
	}
	texts := make([]Text, len(seqs))
	for range steps {
		for i, s := range seqs {
			texts[i] = Text{s, tokens[i : i+1]}
		}
		next, err := d.Next(texts...)
		if err != nil {
			return nil, err
		}
		tokens = make([]int, len(seqs))
		for i := range next {
			tokens[i] = next[i][0]
		}
		all = append(all, tokens)
	}
	return all, nil
}

// continueGPU queues the steps. The tokens that a step chose are the input of the next one, and are kept in a tensor
// that is downloaded at the end.
func (d *Decoder) continueGPU(seqs []*la.Sequence, tokens []int, steps int) (all [][]int, err error) {
	n := len(seqs)
	g, err := d.graph(n)
	if err != nil {
		return nil, err
	}
	appends := make([]la.Append, n)
	for i, s := range seqs {
		appends[i] = la.Append{Seq: s, Tokens: 1}
	}
	history, err := d.gpu.NewTensor(tensor.Int32, steps*n)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, history.Free()) }()
	clear(g.ids) // unassigned rows have token 0
	copy(g.ids, tokens)
	err = g.put(g.ids)
	for i := 0; i < steps && err == nil; i++ {
		err = g.follow(appends, i > 0, history, i*n)
	}
	if err != nil {
		return nil, err
	}
	t, err := history.Download() // waits for all steps
	if err != nil {
		return nil, err
	}
	for rows := t.Data().([]int32); len(rows) > 0; rows = rows[n:] {
		next, err := chosen(rows[:n])
		if err != nil {
			return nil, err
		}
		all = append(all, next)
	}
	return all, nil
}

// follow queues a step that reads the tokens that the last step has chosen, or the present inputs, and copies its
// chosen tokens into rows of history from at on.
func (gr *graph) follow(appends []la.Append, last bool, history *device.Tensor, at int) error {
	return gr.step.Run(appends, func() error {
		n := len(appends)
		if last {
			if err := copyRows(gr.there, 0, gr.result, n); err != nil {
				return err
			}
		}
		if err := gr.queue(); err != nil {
			return err
		}
		return copyRows(history, at, gr.result, n)
	})
}

// copyRows copies the first n rows of a tensor to the rows from at on of another.
func copyRows(to *device.Tensor, at int, from *device.Tensor, n int) error {
	dst, err := to.Rows(at, at+n)
	if err != nil {
		return err
	}
	src, err := from.Rows(0, n)
	if err != nil {
		return err
	}
	return dst.CopyFrom(src)
}
