package gpu

import (
	"errors"
	"fmt"

	"gorgonia.org/leanattention/cmd/leanbench/measure"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/lean"
)

// What other commands measure shapes of their own with.

// Way is how our kernels attend: by which schedule, and to keys that lie where.
type Way struct {
	Name   string
	Policy lean.Policy
	Pages  int // tokens of a page; 0: contiguous, which ragged shapes can't have
}

// RaggedShape is a batch of any lengths, under a name.
func RaggedShape(name string, heads, kvHeads, dim int, lengths []int) Shape {
	return Shape{name: name, heads: heads, kvHeads: kvHeads, dim: dim, lengths: lengths}
}

// Open opens the GPU and starts the peers. Without peers there is a note that says why,
// and no error.
func (b *Bench) Open() error {
	if err := b.open(); err != nil {
		return err
	}
	if err := b.startPeers(); err != nil {
		b.Note("%v", err)
	}
	return nil
}

// Close gives back what Open and OpenPower took.
func (b *Bench) Close() error {
	return errors.Join(b.power.close(), b.peers.close(), b.Device.Close())
}

// Info describes the GPU.
func (b *Bench) Info() cuda.Info { return b.Device.dev.Info() }

// Largest is the largest shape that there is memory for, in bytes of its keys and values in pages.
func (b *Bench) Largest() (int64, error) {
	m, err := b.Device.dev.Memory()
	if b.peers != nil {
		return m.Free / 10 * 4, err // they have operands of their own
	}
	return m.Free / 10 * 8, err
}

// Arenas takes memory for the operands of all shapes, and for Clock, here and in the peers' process, instead of what
// was taken before.
func (b *Bench) Arenas(shapes []Shape) error {
	size := clockShape.rotation()
	for i := range shapes {
		size = max(size, shapes[i].rotation())
	}
	if keys := b.Device.keys; keys != nil && keys.Len() == size {
		return nil // it is there
	}
	if err := b.Device.Fill(size, ArenaPeriod); err != nil {
		return err
	}
	return b.peers.arena(size)
}

// With lets use have those who compute a shape: the ceilings first, then our kernels in all
// ways, whose outputs have been compared with float64, and the peers. What a way can't do is
// an error.
func (b *Bench) With(s Shape, ways []Way, use func(all []*Contender, ceilings int) error) (err error) {
	all, err := b.Device.Ceilings(s)
	defer func() { err = errors.Join(err, CloseAll(all)) }()
	if err != nil {
		return err
	}
	ceilings := len(all)
	for _, w := range ways {
		if w.Pages == 0 && !s.even() {
			return fmt.Errorf("%s: %s: contexts of several lengths lie in pages", s, w.Name)
		}
		p := layOut(s, w.Pages, b.Device.rng)
		p.geometry.Policy = w.Policy
		one, err := b.Device.attention(w.Name, &p)
		if one != nil {
			all = append(all, one)
		}
		if err != nil {
			return err
		}
	}
	return use(append(all, b.peers.contenders(s)...), ceilings)
}

// CountsAsBest says whether a contender is a peer that may be the best one.
func CountsAsBest(name string) bool { return countsAsBest(name) }

// Ours is what reports call our kernels with their own schedule.
const Ours = ours

// Median is that of all replays, in seconds.
func (t *Times) Median() float64 { return measure.Median(append([]float64(nil), t.Replays...)) }
