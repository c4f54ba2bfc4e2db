package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"unsafe"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/half"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// storage is an element type of keys and values.
type storage struct {
	name  string // as PyTorch's workers and the tables have it
	dtype tensor.Dtype
	size  int
}

var (
	storeF32  = storage{"f32", tensor.Float32, 4}
	storeF16  = storage{"f16", la.Float16, 2}
	storeBF16 = storage{"bf16", la.BFloat16, 2}
	storages  = []storage{storeF32, storeF16, storeBF16}
)

// decodeShape is one decode step of one sequence: a query for each head over
// keys of kvHeads heads.
type decodeShape struct {
	heads, kvHeads, keys, dim int
	storage                   storage
}

// bytes is the size of keys and values, which a step reads once.
func (s decodeShape) bytes() int { return 2 * s.kvHeads * s.keys * s.dim * s.storage.size }

func (s decodeShape) String() string {
	heads := fmt.Sprint(s.heads)
	if s.kvHeads != s.heads {
		heads += fmt.Sprintf("/%d", s.kvHeads)
	}
	return fmt.Sprintf("%s, %s heads x %d x %d", s.storage.name, heads, s.keys, s.dim)
}

// arena is memory with random numbers of one element type in it: in (-1, 1),
// none of them the zeros that some libraries skip and some machines do not store.
type arena struct {
	storage storage
	words   []uint64
}

func newArena(s storage, bytes int, rng *rand.Rand) *arena {
	a := &arena{s, make([]uint64, (bytes+7)/8)}
	uniform := func(bits uint64) float32 { return float32(int32(bits)|1) / (1 << 31) }
	if s == storeF32 {
		for i := range a.words {
			r := rng.Uint64()
			low, high := math.Float32bits(uniform(r)), math.Float32bits(uniform(r>>32))
			a.words[i] = uint64(high)<<32 | uint64(low)
		}
		return a
	}
	var table [1 << 16]uint64
	for i := range table {
		if f := uniform(rng.Uint64()); s == storeF16 {
			table[i] = uint64(half.FromFloat32(f))
		} else {
			table[i] = uint64(half.BFromFloat32(f))
		}
	}
	for i := range a.words {
		r := rng.Uint64()
		a.words[i] = table[r&0xffff] | table[r>>16&0xffff]<<16 | table[r>>32&0xffff]<<32 | table[r>>48]<<48
	}
	return a
}

// operands are the keys and values of one step, and the memory that both
// together are.
type operands struct {
	k, v  *tensor.Dense // (kvHeads, keys, dim)
	bytes []byte
}

// carve cuts operands of a shape out of the arena, as many as there is room for
// but at most most.
func (a *arena) carve(s decodeShape, most int) []operands {
	memory := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(a.words))), 8*len(a.words))
	var sets []operands
	for n := s.bytes(); len(memory) >= n && len(sets) < most; memory = memory[n:] {
		shape := tensor.WithShape(s.kvHeads, s.keys, s.dim)
		sets = append(sets, operands{
			k:     tensor.New(shape, a.backing(memory[:n/2])),
			v:     tensor.New(shape, a.backing(memory[n/2:n])),
			bytes: memory[:n:n],
		})
	}
	return sets
}

func (a *arena) backing(b []byte) tensor.ConsOpt {
	p := unsafe.Pointer(unsafe.SliceData(b))
	switch a.storage {
	case storeF32:
		return tensor.WithBacking(unsafe.Slice((*float32)(p), len(b)/4))
	case storeF16:
		return tensor.WithBacking(unsafe.Slice((*la.F16)(p), len(b)/2))
	default:
		return tensor.WithBacking(unsafe.Slice((*la.BF16)(p), len(b)/2))
	}
}

// newQuery is a query for each head, such that the scores differ by some units.
func newQuery(s decodeShape, rng *rand.Rand) *tensor.Dense {
	data := make([]float32, s.heads*s.dim)
	for i := range data {
		data[i] = float32(3 * rng.NormFloat64())
	}
	return tensor.New(tensor.WithShape(s.heads, 1, s.dim), tensor.WithBacking(data))
}

// attender is a contender that computes attention. Its steps take the sets of
// operands in turn.
type attender struct {
	contender
	out func() []float32 // of the last step, valid until the next
}

// attend is leanattention.Attend.
func attend(s decodeShape, q *tensor.Dense, sets []operands) attender {
	out := make([]float32, s.heads*s.dim)
	a := la.Args{Q: q, Out: tensor.New(tensor.WithShape(s.heads, 1, s.dim), tensor.WithBacking(out))}
	next := 0
	step := func() error {
		a.K, a.V = sets[next].k, sets[next].v
		next = (next + 1) % len(sets)
		return la.Attend(a)
	}
	return attender{contender{name: "lean, Attend", run: timed(step)}, func() []float32 { return out }}
}

// node is an attention node in a graph of its own.
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
	return attender{contender{name: name, run: timed(step)}, func() []float32 { return out.Data().([]float32) }}, nil
}

func leanNode(s decodeShape, q *tensor.Dense, sets []operands) (attender, error) {
	return node("lean, node", func(q, k, v *G.Node) (*G.Node, error) { return la.Attention(q, k, v) }, s, q, sets)
}

func stockNode(s decodeShape, q *tensor.Dense, sets []operands) (attender, error) {
	return node("default node", func(q, k, v *G.Node) (*G.Node, error) { return la.Default(q, k, v) }, s, q, sets)
}

// ceiling reads the same memory as the others do and only sums it.
func ceiling(sets []operands) contender {
	next, sum := 0, uint64(0)
	step := func() error {
		part, err := cpu.ReadSum(cpu.Default(), sets[next].bytes)
		next = (next + 1) % len(sets)
		sum += part
		return err
	}
	return contender{name: readCeiling, run: timed(step)}
}

// agree lets each do one step on the same operands and compares what comes out:
// a speed is worth something only if the work was done.
func agree(attenders []attender) error {
	var want []float32
	for i, a := range attenders {
		if _, err := a.run(1); err != nil {
			return fmt.Errorf("%s: %w", a.name, err)
		}
		got := a.out()
		if i == 0 {
			want = append(want, got...)
			continue
		}
		for j := range want {
			// Written so that a NaN does not agree with anything.
			if d := math.Abs(float64(got[j]) - float64(want[j])); !(d <= 1e-4) {
				return fmt.Errorf("element %d of the output is %v from %q and %v from %q", j, got[j], a.name, want[j], attenders[0].name)
			}
		}
	}
	return nil
}
