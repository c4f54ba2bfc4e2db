package cpu

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"unsafe"

	"gorgonia.org/leanattention/cmd/leanbench/measure"

	la "gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

const tableForks = "A token of each of several forks"

// forksShape is the shape of a decode step of sequences that share a prefix.
type forksShape struct {
	heads, kvHeads, dim     int
	sequences, prefix, keys int // keys: those of each sequence after the prefix
	storage                 measure.Storage
}

func (s forksShape) String() string {
	heads := fmt.Sprint(s.heads)
	if s.kvHeads != s.heads {
		heads += fmt.Sprintf("/%d", s.kvHeads)
	}
	return fmt.Sprintf("%s, %d forks of %d and %d each, %s heads x %d", s.storage.Name, s.sequences, s.prefix, s.keys, heads, s.dim)
}

// bytes returns the size of all keys and values, with the prefix counted once.
func (s forksShape) bytes() int {
	return 2 * (s.prefix + s.sequences*s.keys) * s.kvHeads * s.dim * s.storage.Size
}

func forksCases() (cases []forksShape) {
	for _, store := range []measure.Storage{measure.StoreF32, measure.StoreF16} {
		for _, heads := range [][3]int{{32, 8, 128}, {12, 12, 64}} {
			for _, n := range [][3]int{{2, 8192, 128}, {16, 8192, 128}} {
				cases = append(cases, forksShape{heads[0], heads[1], heads[2], n[0], n[1], n[2], store})
			}
		}
	}
	return cases
}

// measureForks measures the gain of reading a shared prefix once for all forks.
func measureForks(flags *flag.FlagSet) func(stdout, stderr io.Writer) error {
	o := measure.Flags(flags)
	return func(stdout, stderr io.Writer) error {
		b, err := newBench("forks", o, stdout, stderr)
		if err != nil {
			return err
		}
		b.report.WriteHead(stdout)
		for _, s := range forksCases() {
			fmt.Fprintln(stderr, s)
			if err := b.forks(s); err != nil {
				return fmt.Errorf("%s: %w", s, err)
			}
			if err := b.report.Save(b.json); err != nil {
				return err
			}
		}
		b.report.WriteTable(stdout, tableForks)
		b.report.WriteVerdict(stdout)
		return nil
	}
}

func (b *attentionBench) forks(s forksShape) error {
	var attenders []attender
	for _, forked := range []bool{true, false} {
		// Both contenders use the same random numbers, because agree compares their outputs.
		a, closes, err := newForks(s, forked, rand.New(rand.NewPCG(1, 2)))
		if err != nil {
			return err
		}
		defer closes()
		attenders = append(attenders, a)
	}
	if err := agree(attenders); err != nil {
		return err
	}
	arena := measure.NewArena(s.storage, s.bytes(), b.rng)
	memory := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(arena.Words))), s.bytes())
	contenders := []measure.Contender{
		ceiling([]operands{{bytes: memory}}), attenders[0].Contender, attenders[1].Contender,
	}
	all, err := measure.Alternate(b.pace, contenders)
	if err != nil {
		return err
	}
	for i, t := range all {
		r := b.report.Row(tableForks, s.String(), contenders[i].Name)
		r.Add(measure.StepMillis, 1e3*t.Median(), nil)
		if i == 1 {
			r.Add(measure.OverCopies, t.Faster(all[2]), measure.AtLeast(1))
		}
	}
	return nil
}

// newForks returns a decode step of one token per sequence, over forks of one sequence or over independent
// copies. closes frees the cache.
func newForks(s forksShape, forked bool, rng *rand.Rand) (a attender, closes func(), err error) {
	const page, chunk = 16, 256
	name, tokens := "forks", s.prefix+page
	if !forked {
		name, tokens = "copies", s.sequences*(s.prefix+page)
	}
	tokens += s.sequences * (s.keys + 2*page)
	cache, err := la.NewCache(la.CacheConfig{Layers: 1, KVHeads: s.kvHeads, HeadDim: s.dim, DType: s.storage.Dtype, PageSize: page, Pages: tokens/page + 1})
	if err != nil {
		return a, nil, err
	}
	run, _, err := forksStep(s, cache, chunk, la.WithWindow(1)) // The outputs of these steps are discarded, so the smallest window saves their attention.
	if err != nil {
		return a, nil, err
	}
	grow := func(seq *la.Sequence, tokens int, rng *rand.Rand) error {
		for done := 0; done < tokens; {
			n := min(chunk, tokens-done)
			if err := run([]la.Append{{Seq: seq, Tokens: n}}, rng, true); err != nil {
				return err
			}
			done += n
		}
		return nil
	}
	var seqs []*la.Sequence
	seed := rng.Uint64()
	for i := range s.sequences {
		var seq *la.Sequence
		if i > 0 && forked {
			if err := seqs[0].Truncate(s.prefix); err != nil {
				return a, nil, err
			}
			seq, err = seqs[0].Fork()
		} else if seq, err = cache.NewSequence(); err == nil {
			err = grow(seq, s.prefix, rand.New(rand.NewPCG(seed, 0)))
		}
		if err != nil {
			return a, nil, err
		}
		seqs = append(seqs, seq)
	}
	for i, seq := range seqs {
		if err := grow(seq, s.keys-1, rand.New(rand.NewPCG(seed, uint64(1+i)))); err != nil {
			return a, nil, err
		}
	}
	decode, out, err := forksStep(s, cache, s.sequences)
	if err != nil {
		return a, nil, err
	}
	var appends []la.Append
	for _, seq := range seqs {
		appends = append(appends, la.Append{Seq: seq, Tokens: 1})
	}
	numbers := rand.New(rand.NewPCG(seed, math.MaxUint64))
	step := func() error {
		err := decode(appends, numbers, false)
		numbers = nil // later steps reuse q, k and v
		return err
	}
	return attender{measure.Contender{Name: name, Run: measure.Timed(step)}, out}, func() { cache.Close() }, nil
}

// forksStep returns a step of the given number of rows. run fills q, k and v from rng, unless rng is nil, and
// then commits the step or rolls it back.
func forksStep(s forksShape, cache *la.Cache, rows int, opts ...la.Option) (run func(appends []la.Append, rng *rand.Rand, commit bool) error, out func() []float32, err error) {
	step, err := cache.NewStep(rows)
	if err != nil {
		return nil, nil, err
	}
	g := G.NewGraph()
	var nodes [3]*G.Node
	var values [3][]float32
	for i, width := range []int{s.heads * s.dim, s.kvHeads * s.dim, s.kvHeads * s.dim} {
		values[i] = make([]float32, rows*width)
		nodes[i] = G.NewMatrix(g, tensor.Float32, G.WithShape(rows, width), G.WithName("qkv"[i:i+1]),
			G.WithValue(tensor.New(tensor.WithShape(rows, width), tensor.WithBacking(values[i]))))
	}
	o, err := la.CachedAttention(nodes[0], nodes[1], nodes[2], step.Layer(0), append(opts, la.WithCausal())...)
	if err != nil {
		return nil, nil, err
	}
	var result G.Value
	G.Read(o, &result)
	machine := G.NewTapeMachine(g)
	run = func(appends []la.Append, rng *rand.Rand, commit bool) error {
		if rng != nil {
			for _, x := range values {
				for i := range x {
					x[i] = float32(rng.NormFloat64())
				}
			}
		}
		compute := func() error {
			defer machine.Reset()
			return la.Cause(machine.RunAll())
		}
		if commit {
			return step.Run(appends, compute)
		}
		if err := step.Set(appends); err != nil { // rollback keeps the lengths, so every step is the same
			return err
		}
		return errors.Join(compute(), step.Rollback())
	}
	return run, func() []float32 { return result.Data().([]float32) }, nil
}
