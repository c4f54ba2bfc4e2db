package llama

import (
	"errors"
	"fmt"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"

	"gorgonia.org/tensor"
)

// Next is a step of a greedy decoder: of each text the most likely token behind each of its tokens. Where logits are NaN
// or infinite there is none, which is an error.
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

// chosen are tokens that an ArgMax has chosen of a step, whose rows of nobody are left out.
func chosen(rows []int32) ([]int, error) {
	own := make([]int, len(rows))
	for i, id := range rows {
		if own[i] = int(id); id < 0 {
			return nil, fmt.Errorf("llama: logits of row %d of %d are NaN or infinite", i, len(rows))
		}
	}
	return own, nil
}

// Continue is so many steps of a greedy decoder. The first appends tokens, one to each sequence, and every other what
// the one before has chosen; what each of them chose is returned. On a GPU the host waits for the last one only. After an
// error some steps may have been done: the lengths of the sequences tell.
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

// continueGPU queues the steps one behind the other. What a step chose is the input of the next one, and is kept in a
// tensor that comes down at the end.
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
	clear(g.ids) // rows of nobody have token 0
	copy(g.ids, tokens)
	err = g.put(g.ids)
	for i := 0; i < steps && err == nil; i++ {
		err = g.follow(appends, i > 0, history, i*n)
	}
	if err != nil {
		return nil, err
	}
	t, err := history.Download() // it waits
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

// follow queues a step that reads what the last one has chosen, or else what is there already, and puts what it
// chooses into rows of history from at on.
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

// copyRows copies the first n rows of a tensor to those from at on of another.
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
