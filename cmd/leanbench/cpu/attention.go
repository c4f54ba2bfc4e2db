package cpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"unsafe"

	"gorgonia.org/leanattention/cmd/leanbench/measure"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/cpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// decodeShape is the shape of a decode step of one sequence: one query per query head, and keys of kvHeads KV
// heads.
type decodeShape struct {
	heads, kvHeads, keys, dim int
	storage                   measure.Storage
}

// bytes returns the size of keys and values. A step reads each byte once.
func (s decodeShape) bytes() int { return 2 * s.kvHeads * s.keys * s.dim * s.storage.Size }

func (s decodeShape) String() string {
	heads := fmt.Sprint(s.heads)
	if s.kvHeads != s.heads {
		heads += fmt.Sprintf("/%d", s.kvHeads)
	}
	return fmt.Sprintf("%s, %s heads x %d x %d", s.storage.Name, heads, s.keys, s.dim)
}

// operands are the keys and values of one step. bytes is the memory behind both.
type operands struct {
	k, v  *tensor.Dense // (kvHeads, keys, dim)
	bytes []byte
}

// carve cuts operands of a shape out of the arena: as many as fit, and at most most.
func carve(a *measure.Arena, s decodeShape, most int) []operands {
	memory := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(a.Words))), 8*len(a.Words))
	var sets []operands
	for n := s.bytes(); len(memory) >= n && len(sets) < most; memory = memory[n:] {
		shape := tensor.WithShape(s.kvHeads, s.keys, s.dim)
		sets = append(sets, operands{
			k:     tensor.New(shape, backing(a, memory[:n/2])),
			v:     tensor.New(shape, backing(a, memory[n/2:n])),
			bytes: memory[:n:n],
		})
	}
	return sets
}

func backing(a *measure.Arena, b []byte) tensor.ConsOpt {
	p := unsafe.Pointer(unsafe.SliceData(b))
	switch a.Storage {
	case measure.StoreF32:
		return tensor.WithBacking(unsafe.Slice((*float32)(p), len(b)/4))
	case measure.StoreF16:
		return tensor.WithBacking(unsafe.Slice((*la.F16)(p), len(b)/2))
	default:
		return tensor.WithBacking(unsafe.Slice((*la.BF16)(p), len(b)/2))
	}
}

// newQuery returns one query per head. The scale 3 makes the scores differ by several units.
func newQuery(s decodeShape, rng *rand.Rand) *tensor.Dense {
	data := make([]float32, s.heads*s.dim)
	for i := range data {
		data[i] = float32(3 * rng.NormFloat64())
	}
	return tensor.New(tensor.WithShape(s.heads, 1, s.dim), tensor.WithBacking(data))
}

// attender is a contender that computes attention. Consecutive steps cycle through the sets of operands.
type attender struct {
	measure.Contender
	out func() []float32 // output of the last step, valid until the next step
}

// attend returns a contender that calls leanattention.Attend.
func attend(s decodeShape, q *tensor.Dense, sets []operands) attender {
	out := make([]float32, s.heads*s.dim)
	a := la.Args{Q: q, Out: tensor.New(tensor.WithShape(s.heads, 1, s.dim), tensor.WithBacking(out))}
	next := 0
	step := func() error {
		a.K, a.V = sets[next].k, sets[next].v
		next = (next + 1) % len(sets)
		return la.Attend(a)
	}
	return attender{measure.Contender{Name: "lean, Attend", Run: measure.Timed(step)}, func() []float32 { return out }}
}

// node returns a contender that runs a graph with one attention node.
func node(name string, make func(q, k, v *G.Node) (*G.Node, error), s decodeShape, q *tensor.Dense, sets []operands) (attender, error) {
	g := G.NewGraph()
	input := func(name string, t *tensor.Dense) *G.Node {
		return G.NewTensor(g, t.Dtype(), 3, G.WithShape(t.Shape()...), G.WithName(name), G.WithValue(t))
	}
	k, v := input("k", sets[0].k), input("v", sets[0].v)
	o, err := make(input("q", q), k, v)
	if err != nil {
		return attender{}, err
	}
	var out G.Value
	G.Read(o, &out)
	machine := G.NewTapeMachine(g)
	next := 0
	step := func() error {
		if len(sets) > 1 {
			if err := G.Let(k, sets[next].k); err != nil {
				return err
			}
			if err := G.Let(v, sets[next].v); err != nil {
				return err
			}
			next = (next + 1) % len(sets)
		}
		if err := la.Cause(machine.RunAll()); err != nil {
			return err
		}
		machine.Reset()
		return nil
	}
	return attender{measure.Contender{Name: name, Run: measure.Timed(step)}, func() []float32 { return out.Data().([]float32) }}, nil
}

func leanNode(s decodeShape, q *tensor.Dense, sets []operands) (attender, error) {
	return node("lean, node", func(q, k, v *G.Node) (*G.Node, error) { return la.Attention(q, k, v) }, s, q, sets)
}

func stockNode(s decodeShape, q *tensor.Dense, sets []operands) (attender, error) {
	return node("default node", func(q, k, v *G.Node) (*G.Node, error) { return la.Default(q, k, v) }, s, q, sets)
}

// ceiling returns a contender that only sums the bytes that attention reads.
func ceiling(sets []operands) measure.Contender {
	next, sum := 0, uint64(0)
	step := func() error {
		part, err := cpu.ReadSum(cpu.Default(), sets[next].bytes)
		next = (next + 1) % len(sets)
		sum += part
		return err
	}
	return measure.Contender{Name: measure.ReadCeiling, Run: measure.Timed(step)}
}

// agree runs one step of each attender on the same operands and compares the outputs. A speed counts only if
// the result is right.
func agree(attenders []attender) error {
	var want []float32
	for i, a := range attenders {
		if _, err := a.Run(1); err != nil {
			return fmt.Errorf("%s: %w", a.Name, err)
		}
		got := a.out()
		if i == 0 {
			want = append(want, got...)
			continue
		}
		for j := range want {
			// This form of the condition also rejects NaN.
			if d := math.Abs(float64(got[j]) - float64(want[j])); !(d <= 1e-4) {
				return fmt.Errorf("element %d of the output is %v from %q and %v from %q", j, got[j], a.Name, want[j], attenders[0].Name)
			}
		}
	}
	return nil
}
