package model

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	la "gorgonia.org/leanattention"
)

// WriteSequence saves the keys and values of sequence i, as leanattention.Sequence.WriteTo does. The caller records
// the tokens and the model: see [Weights.Fingerprint].
func (d *Decoder) WriteSequence(i int, w io.Writer) error {
	c, err := d.pages(i)
	if err != nil {
		return err
	}
	_, err = c.sequences[i].WriteTo(w)
	return err
}

// ReadSequence loads into sequence i what WriteSequence has saved, for a model of the same shape and with the same
// type of cache, on any device. tokens is the number of saved tokens: another number is ErrConfig. After an error the
// sequence is unchanged. During the call there must be pages for these tokens beside those of the present sequence.
func (d *Decoder) ReadSequence(i int, r io.Reader, tokens int) error {
	c, err := d.pages(i)
	if err != nil {
		return err
	}
	if n := d.options.Capacity[i]; tokens < 0 || tokens > n {
		return fmt.Errorf("%w: %d tokens for sequence %d, whose capacity is %d", ErrConfig, tokens, i, n)
	}
	s, err := c.ReadSequence(r)
	if err != nil {
		return err
	}
	if s.Len() != tokens {
		return errors.Join(fmt.Errorf("%w: the saved sequence has %d tokens, and %d are expected", ErrConfig, s.Len(), tokens), s.Release())
	}
	return d.replace(c, i, s, tokens)
}

// Fingerprint distinguishes models with different keys and values. It is made from the config, from all weights'
// types and shapes, and from up to 4096 evenly spaced elements of each weight. (A model of some GB takes 0.1 s.)
func (w *Weights) Fingerprint() (sum [sha256.Size]byte) {
	h := sha256.New()
	fmt.Fprintf(h, "%+v\n", w.config)
	for p := range w.config.Weights() {
		t := w.tensors[p.Name]
		fmt.Fprintf(h, "%s %v %v\n", p.Name, t.Dtype(), t.Shape())
		var elements any
		switch data := t.Data().(type) {
		case []float32:
			elements = spread(data)
		case []la.F16:
			elements = spread(data)
		case []la.BF16:
			elements = spread(data)
		}
		// A hash returns no error, and Load admits only these three types.
		if err := binary.Write(h, binary.LittleEndian, elements); err != nil {
			panic(fmt.Sprintf("model: weight %s of type %v: %v", p.Name, t.Dtype(), err))
		}
	}
	h.Sum(sum[:0])
	return sum
}

// spread returns up to 4096 evenly spaced elements of a weight.
func spread[T any](data []T) []T {
	const most = 4096
	if len(data) <= most {
		return data
	}
	some := make([]T, most)
	for i := range some {
		some[i] = data[i*(len(data)-1)/(most-1)]
	}
	return some
}
