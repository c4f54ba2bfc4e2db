package decoder

import (
	"errors"
	"slices"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// draw is how a GPU chooses the token of a row of logits. The zero draw chooses the most likely token.
type draw struct {
	nn.Choice
	random float64 // in [0, 1)
}

// drawer chooses tokens by draws on a GPU.
type drawer struct {
	rows             int
	op               G.Op
	choices, randoms *device.Tensor
	last             []nn.Choice // the values of choices
}

// newDrawer returns a drawer for some rows of logits.
func newDrawer(gpu *device.GPU, rows, vocab int) (d *drawer, err error) {
	d = &drawer{rows: rows, last: make([]nn.Choice, rows)}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	if d.choices, err = gpu.UploadReplicated(nn.Choices(d.last)); err != nil {
		return d, err
	}
	if d.randoms, err = gpu.UploadReplicated(nn.Randoms(make([]float64, rows))); err != nil {
		return d, err
	}
	g := G.NewGraph()
	logits := G.NewMatrix(g, tensor.Float32, G.WithShape(rows, vocab), G.WithName("logits"))
	ids, err := nn.Sample(logits, input(g, "choices", d.choices), input(g, "randoms", d.randoms))
	if err != nil {
		return d, err
	}
	d.op = ids.Op()
	return d, nil
}

// draw queues the choice of a token from each row of logits, and returns the tokens, which are valid until the next call.
// Rows without a draw have the most likely token.
func (d *drawer) draw(logits *device.Tensor, draws []draw) (*device.Tensor, error) {
	choices, randoms := make([]nn.Choice, d.rows), make([]float64, d.rows)
	for i, x := range draws {
		choices[i], randoms[i] = x.Choice, x.random
	}
	if !slices.Equal(choices, d.last) {
		if err := d.choices.CopyFrom(nn.Choices(choices)); err != nil {
			return nil, err
		}
		d.last = choices
	}
	if err := d.randoms.CopyFrom(nn.Randoms(randoms)); err != nil {
		return nil, err
	}
	in := []G.Value{logits, d.choices, d.randoms}
	if n := logits.Shape()[0]; n < d.rows {
		for i, all := range []*device.Tensor{d.choices, d.randoms} {
			part, err := all.Rows(0, n)
			if err != nil {
				return nil, err
			}
			in[1+i] = part
		}
	}
	v, err := d.op.Do(in...)
	if err != nil {
		return nil, la.Cause(err)
	}
	return onGPU(v)
}

func (d *drawer) close() (err error) {
	if d == nil {
		return nil
	}
	for _, t := range []*device.Tensor{d.choices, d.randoms} {
		if t != nil {
			err = errors.Join(err, t.Free())
		}
	}
	return err
}
