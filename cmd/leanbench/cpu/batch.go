package cpu

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unsafe"

	"gorgonia.org/leanattention/cmd/leanbench/measure"

	la "gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// The types and functions below are exported for other commands, which measure batches with them.

// Batch is the shape of a decode step: one query per head and sequence.
type Batch struct {
	Heads, KVHeads, Dim int
	Lengths             []int // keys of each sequence
	Storage             measure.Storage
}

// capacity returns the keys that each sequence has memory for.
func (s Batch) capacity() int { return slices.Max(s.Lengths) }

func (s Batch) even() bool { return slices.Min(s.Lengths) == s.capacity() }

// Bytes returns the size of keys and values. A step reads each byte once.
func (s Batch) Bytes() (n int) {
	for _, l := range s.Lengths {
		n += l
	}
	return 2 * n * s.KVHeads * s.Dim * s.Storage.Size
}

// Region returns the size of the memory for keys and values. Every sequence has memory for the longest
// length.
func (s Batch) Region() int {
	return 2 * len(s.Lengths) * s.capacity() * s.KVHeads * s.Dim * s.Storage.Size
}

// Schedule is a schedule of leanattention and its name in reports.
type Schedule struct {
	Name string
	la.Schedule
}

// Names of contenders in reports.
const (
	NameAttend = "lean, Attend"
	NameStock  = "default node"
	NameTorch  = "PyTorch"
	NamePacked = "PyTorch, groups packed by hand"
)

// Batches measures one batch at a time.
type Batches struct {
	*attentionBench
	torch *measure.Worker // nil: PyTorch is left out
}

// NewBatches returns Batches that measure on this machine with o.Workers threads. If python is empty or has
// no PyTorch, the report gets a note, and NewBatches returns no error.
func NewBatches(command string, o *measure.Options, pace measure.Pace, python string, stdout, stderr io.Writer) (*Batches, error) {
	b, err := newBench(command, o, stdout, stderr)
	if err != nil {
		return nil, err
	}
	b.pace = pace
	all := &Batches{attentionBench: b}
	if python == "" {
		b.report.Notes = append(b.report.Notes, "PyTorch is left out: no -python")
		return all, nil
	}
	w, err := startTorch(python, fmt.Sprint(o.Workers))
	if err != nil {
		reason, _, _ := strings.Cut(err.Error(), "\n")
		b.report.Notes = append(b.report.Notes, "PyTorch is left out: "+strings.TrimSuffix(reason, ":"))
		return all, nil
	}
	all.torch = w
	if len(w.Hello) > 1 {
		b.report.Versions = map[string]string{w.Hello[0]: w.Hello[1]}
	}
	return all, nil
}

// startTorch starts the PyTorch worker. Tests replace it.
var startTorch = func(python string, args ...string) (*measure.Worker, error) {
	return measure.StartWorker(python, attentionWorker, args...)
}

// Close ends the PyTorch worker.
func (b *Batches) Close() error {
	if b.torch == nil {
		return nil
	}
	return b.torch.Close()
}

// Report returns the report with all figures measured so far.
func (b *Batches) Report() *measure.Report { return b.report }

// batchSet holds the operands of a step.
type batchSet struct {
	k, v *tensor.Dense // (batch, kvHeads, capacity, dim)
	live []byte        // Bytes() bytes of the same memory, for the ceiling
}

// mostRegions is the most bytes that the operands of all sets may take. The limit matters for ragged batches,
// where every sequence has memory for the longest length.
const mostRegions = 1 << 30

// sets returns the operands of consecutive steps: as many as together read 256 MB within mostRegions, and at
// least one.
func (b *Batches) sets(s Batch) (sets []batchSet) {
	region := s.Region()
	n := max(1, min(memorySize/s.Bytes(), mostRegions/region))
	if size := n * region; b.arena == nil || b.arena.Storage != s.Storage || 8*len(b.arena.Words) < size {
		b.arena = nil // frees the old arena before the new one is allocated
		b.arena = measure.NewArena(s.Storage, size, b.rng)
	}
	memory := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(b.arena.Words))), 8*len(b.arena.Words))
	shape := tensor.WithShape(len(s.Lengths), s.KVHeads, s.capacity(), s.Dim)
	for ; len(sets) < n; memory = memory[region:] {
		sets = append(sets, batchSet{
			tensor.New(shape, backing(b.arena, memory[:region/2])), tensor.New(shape, backing(b.arena, memory[region/2:region])), memory[:s.Bytes()],
		})
	}
	return sets
}

// Measure measures a step of s with each schedule, with the default node (float32 only), with PyTorch and
// with the read ceiling. The contenders alternate. Measure returns their names and times, those of the
// ceiling first.
func (b *Batches) Measure(s Batch, schedules []Schedule) (names []string, all []measure.Samples, err error) {
	sets, q := b.sets(s), newQuery(decodeShape{heads: len(s.Lengths) * s.Heads, dim: s.Dim}, b.rng)
	if err := q.Reshape(len(s.Lengths), s.Heads, 1, s.Dim); err != nil {
		return nil, nil, err
	}
	var attenders []attender
	for _, x := range schedules {
		attenders = append(attenders, s.attend(x, q, sets))
	}
	if s.Storage == measure.StoreF32 {
		stock, err := s.stock(q, sets)
		if err != nil {
			return nil, nil, err
		}
		attenders = append(attenders, stock)
	}
	if err := agree(attenders); err != nil {
		return nil, nil, err
	}
	operandsOf := make([]operands, len(sets))
	for i := range sets {
		operandsOf[i].bytes = sets[i].live
	}
	contenders := []measure.Contender{ceiling(operandsOf)}
	for _, a := range attenders {
		contenders = append(contenders, a.Contender)
	}
	peers, err := b.peersOf(s, len(sets))
	if err != nil {
		return nil, nil, err
	}
	contenders = append(contenders, peers...)
	for _, c := range contenders {
		names = append(names, c.Name)
	}
	all, err = measure.Alternate(b.pace, contenders)
	return names, all, err
}

// attend returns a contender that calls leanattention.Attend with schedule x.
func (s Batch) attend(x Schedule, q *tensor.Dense, sets []batchSet) attender {
	out := make([]float32, len(s.Lengths)*s.Heads*s.Dim)
	a := la.Args{Q: q, Out: tensor.New(tensor.WithShape(q.Shape().Clone()...), tensor.WithBacking(out))}
	if !s.even() {
		a.Lengths = s.Lengths
	}
	next, schedule := 0, la.WithSchedule(x.Schedule)
	step := func() error {
		a.K, a.V = sets[next].k, sets[next].v
		next = (next + 1) % len(sets)
		return la.Attend(a, schedule)
	}
	return attender{measure.Contender{Name: x.Name, Run: measure.Timed(step)}, func() []float32 { return out }}
}

// stock returns a contender that runs Gorgonia's own three attention nodes. Sequences of equal length share
// one graph. Otherwise each sequence has its own graph, because the nodes always read all keys.
func (s Batch) stock(q *tensor.Dense, sets []batchSet) (attender, error) {
	var graphs []attender
	each := len(s.Lengths) // sequences per graph
	if !s.even() {
		each = 1
	}
	for first := 0; first < len(s.Lengths); first += each {
		one, err := s.stockOf(first, each, q, sets)
		if err != nil {
			return attender{}, err
		}
		graphs = append(graphs, one)
	}
	run := func(n int) (time.Duration, error) {
		began := time.Now()
		for range n {
			for i := range graphs {
				if _, err := graphs[i].Run(1); err != nil {
					return 0, err
				}
			}
		}
		return time.Since(began), nil
	}
	out := func() (all []float32) {
		for i := range graphs {
			all = append(all, graphs[i].out()...)
		}
		return all
	}
	return attender{measure.Contender{Name: NameStock, Run: run}, out}, nil
}

// stockOf returns the graph for sequences [first, first+n), which have equal lengths.
func (s Batch) stockOf(first, n int, q *tensor.Dense, sets []batchSet) (attender, error) {
	keys := s.Lengths[first]
	var own []operands
	for _, set := range sets {
		cut := func(x *tensor.Dense) *tensor.Dense {
			data, head := x.Data().([]float32), s.capacity()*s.Dim
			if n == len(s.Lengths) {
				return tensor.New(tensor.WithShape(n*s.KVHeads, keys, s.Dim), tensor.WithBacking(data))
			}
			// The nodes accept no strides, so the keys of a sequence's heads are copied to be contiguous.
			part := make([]float32, 0, s.KVHeads*keys*s.Dim)
			for h := range s.KVHeads {
				at := (first*s.KVHeads + h) * head
				part = append(part, data[at:at+keys*s.Dim]...)
			}
			return tensor.New(tensor.WithShape(s.KVHeads, keys, s.Dim), tensor.WithBacking(part))
		}
		own = append(own, operands{k: cut(set.k), v: cut(set.v)})
	}
	heads := n * s.Heads
	at := first * s.Heads * s.Dim
	query := tensor.New(tensor.WithShape(heads, 1, s.Dim), tensor.WithBacking(q.Data().([]float32)[at:at+heads*s.Dim]))
	return node(NameStock, func(q, k, v *G.Node) (*G.Node, error) { return la.Default(q, k, v) }, decodeShape{}, query, own)
}

// peersOf returns PyTorch's contenders.
func (b *Batches) peersOf(s Batch, sets int) ([]measure.Contender, error) {
	if b.torch == nil {
		return nil, nil
	}
	if b.torch.Gone { // the worker ended while it measured an earlier shape
		again, err := b.torch.Again()
		if err != nil {
			return nil, err
		}
		b.torch = again
	}
	lengths := strings.ReplaceAll(strings.Trim(fmt.Sprint(s.Lengths), "[]"), " ", ",")
	if _, err := b.torch.Ask("batch %d %d %d %s %d %s", s.Heads, s.KVHeads, s.Dim, s.Storage.Name, sets, lengths); err != nil {
		return nil, err
	}
	ways := []struct{ name, way string }{{NameTorch, "sdpa"}}
	if s.Heads != s.KVHeads {
		ways = append(ways, struct{ name, way string }{NamePacked, "packed"})
	}
	var all []measure.Contender
	for _, w := range ways {
		all = append(all, measure.Contender{Name: w.name, Settle: measure.TorchSettle, Run: b.torch.Steps("run %s", w.way)})
	}
	return all, nil
}

// UseTorch replaces the function that starts the PyTorch worker, until restore is called. Tests use UseTorch.
func UseTorch(start func(python string, args ...string) (*measure.Worker, error)) (restore func()) {
	old := startTorch
	startTorch = start
	return func() { startTorch = old }
}
