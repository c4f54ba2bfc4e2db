package figure

import (
	"fmt"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/lean"
)

// piece is the part of an output tile that one worker computes.
type piece struct {
	Output int   `json:"output"` // number of the output tile, counted by sequence, KV head and block of rows
	Begin  int64 `json:"begin"`  // LeanTiles [Begin, End) of the output tile
	End    int64 `json:"end"`
	Tiles  int64 `json:"tiles"` // LeanTiles of the whole output tile
}

func (k piece) host() bool  { return k.Begin == 0 }
func (k piece) whole() bool { return k.Begin == 0 && k.End == k.Tiles }
func (k piece) len() int64  { return k.End - k.Begin }

// schedule assigns pieces to workers.
type schedule struct {
	Name      string    `json:"schedule"`
	title     string    // Name and the paper's name
	note      string    // remark in the drawing
	Tile      int       `json:"tile"`      // tokens per LeanTile
	Blocks    int       `json:"blocks"`    // thread blocks launched
	Workspace int64     `json:"workspace"` // in bytes
	Workers   [][]piece `json:"workers"`
}

// span returns the LeanTiles of the busiest worker, which is the duration of the schedule.
func (s *schedule) span() (most int64) {
	for _, pieces := range s.Workers {
		var n int64
		for _, k := range pieces {
			n += k.len()
		}
		most = max(most, n)
	}
	return most
}

// busy returns the LeanTiles of all workers.
func (s *schedule) busy() (n int64) {
	for _, pieces := range s.Workers {
		for _, k := range pieces {
			n += k.len()
		}
	}
	return n
}

// occupancy returns the share of the workers' time that is filled with LeanTiles.
func (s *schedule) occupancy() float64 {
	return float64(s.busy()) / (float64(len(s.Workers)) * float64(s.span()))
}

// waves returns the number of waves if each worker runs one thread block at a time.
func (s *schedule) waves() int { return attn.Ceil(s.Blocks, len(s.Workers)) }

// partials returns the number of pieces that have to be merged.
func (s *schedule) partials() (n int) {
	for _, pieces := range s.Workers {
		for _, k := range pieces {
			if !k.whole() {
				n++
			}
		}
	}
	return n
}

// problem is a decode step with one new token per sequence.
type problem struct {
	heads, kvHeads, dim int
	lengths             []int // context lengths, in tokens
	workers             int
	tile                int // tokens per LeanTile; 0: defaultTile, or the GPU engine's own choice
	dtype               attn.DType
}

// defaultTile is the paper's LeanTile, in tokens, for heads of dimension 64 (section IV-B).
const defaultTile = 256

func (p *problem) group() int { return p.heads / p.kvHeads }

func (p *problem) tokens() int {
	if p.tile == 0 {
		return defaultTile
	}
	return p.tile
}

// partialBytes returns the size of a partial. Each row has p.dim output elements and the given count of other
// numbers.
func (p *problem) partialBytes(numbers int) int64 {
	size := int64(4)
	if p.dtype == attn.Float64 {
		size = 8
	}
	return int64(p.group()) * int64(p.dim+numbers) * size
}

// policy is a schedule as -policy names it.
type policy struct {
	name   string
	splits int // splits of fixedSplit; 0: as many as the workers can run at the same time
}

const (
	streamK    = "stream-k"
	fixedSplit = "fixed-split"
	perHead    = "per-head"
	flashInfer = "flashinfer"
	gpuEngine  = "gpu"
)

var policyNames = []string{perHead, fixedSplit, flashInfer, streamK, gpuEngine}

// schedule returns the schedule of p under y.
func (y policy) schedule(p *problem) (*schedule, error) {
	switch y.name {
	case flashInfer:
		return p.flashInfer(), nil
	case gpuEngine:
		return p.gpu()
	}
	return p.lean(y), nil
}

// lean returns the schedule of a policy of package lean.
func (p *problem) lean(y policy) *schedule {
	var plan lean.Plan
	plan.Reset(p.kvHeads)
	for _, n := range p.lengths {
		plan.Add([]int64{lean.Keys{End: n}.Tiles(p.tokens())})
	}
	s := &schedule{Name: y.name, Tile: p.tokens()}
	switch y.name {
	case streamK:
		plan.Cut(lean.Policy{Kind: lean.StreamK}, p.workers)
		s.title, s.note, s.Blocks = "LeanAttention", "stream-K, equal shares", plan.Workers()
		// Two partials per worker are enough for all shapes. A partial is an output, a maximum and a sum.
		s.Workspace = 2 * int64(plan.Workers()) * p.partialBytes(2)
	case perHead:
		plan.Cut(lean.Policy{Kind: lean.PerHead}, p.workers)
		s.title, s.note, s.Blocks = "FlashAttention-2", "one worker for each output tile", int(plan.Outputs())
	case fixedSplit:
		splits := y.splits
		if splits == 0 {
			splits = max(1, p.workers/int(plan.Outputs()))
		}
		plan.Cut(lean.Policy{Kind: lean.FixedSplit, Splits: splits}, p.workers)
		s.title, s.note, s.Blocks = "FlashDecoding", fmt.Sprintf("every context in %d splits", splits), int(plan.Outputs())*splits
		if splits == 1 {
			s.note = "every context in one split"
		} else { // a partial per split: an output and a log-sum-exp
			s.Workspace = int64(s.Blocks) * p.partialBytes(1)
		}
	}
	s.Workers = planPieces(&plan, p.workers)
	return s
}

// planPieces returns the pieces of each worker in a plan.
func planPieces(plan *lean.Plan, workers int) [][]piece {
	all := make([][]piece, workers)
	for w := range plan.Workers() {
		it := plan.Work(w)
		for k, ok := it.Next(); ok; k, ok = it.Next() {
			all[w] = append(all[w], piece{int(k.Output), k.Begin, k.End, k.Tiles})
		}
	}
	return all
}

// flashInfer returns the schedule of FlashInfer's algorithm. A query tile is the rows of one KV head of one
// sequence.
func (p *problem) flashInfer() *schedule {
	s := &schedule{
		Name: flashInfer, title: "FlashInfer", Tile: p.tokens(), Blocks: p.workers,
		// Section D.3: at most two partials per worker, each an output and a log-sum-exp.
		Workspace: 2 * int64(p.workers) * p.partialBytes(1),
	}
	var lengths []int64
	for _, n := range p.lengths {
		for range p.kvHeads {
			lengths = append(lengths, lean.Keys{End: n}.Tiles(s.Tile))
		}
	}
	most, chunks := balance(lengths, p.workers, func(tiles int64) int64 { return int64(p.group()) + tiles*int64(s.Tile) })
	s.note = fmt.Sprintf("chunks of at most %d LeanTiles, longest first to who has least", most)
	if most == 1 {
		s.note = "chunks of one LeanTile, each to who has least"
	}
	s.Workers = make([][]piece, p.workers)
	for _, c := range chunks {
		s.Workers[c.worker] = append(s.Workers[c.worker], piece{c.tile, c.begin, c.end, lengths[c.tile]})
	}
	return s
}

// hopper describes an H100 or H200 with the given number of multiprocessors. The engine's choices were
// measured on both.
func hopper(multiprocessors int) cuda.Info {
	return cuda.Info{Capability: 90, Multiprocessors: multiprocessors, SharedPerBlockMost: 232448}
}

// gpu returns the schedule of the GPU engine for contiguous keys and values.
func (p *problem) gpu() (*schedule, error) {
	longest := 1
	for _, n := range p.lengths {
		longest = max(longest, n)
	}
	rows := attn.Strides{Row: p.heads * p.dim, Head: p.dim}
	keys := attn.PageStrides{Page: p.kvHeads * longest * p.dim, Head: longest * p.dim, Row: p.dim}
	g := attn.Problem{
		Heads: p.heads, KVHeads: p.kvHeads, Dim: p.dim, ValueDim: p.dim, Pages: attn.Separate(p.dtype, p.dim, p.dim, keys, keys), QueryType: p.dtype, Scale: 1,
		Query: rows, Out: rows, LSE: attn.Strides{Row: p.heads, Head: 1}, PageTokens: longest, TileTokens: p.tile,
	}
	seqs := make([]attn.Sequence, len(p.lengths))
	for i, n := range p.lengths {
		seqs[i] = attn.Sequence{Row: i, Queries: 1, Keys: n}
		if n > 0 {
			seqs[i].Pages = []int32{int32(i)}
		}
	}
	launched, err := attention.ScheduleOf(hopper(p.workers), g, seqs)
	if err != nil {
		return nil, err
	}
	// All sequences have one token, so the step needs only one kind of kernel.
	l := launched.Launches[0]
	s := &schedule{
		Name: gpuEngine, title: "GPU engine", Tile: l.Tokens, Blocks: len(l.Blocks), Workspace: launched.Workspace,
		Workers: make([][]piece, len(l.Blocks)),
	}
	blocks := attn.Ceil(p.group(), l.Rows) // blocks of rows per KV head
	working := 0
	for b, shares := range l.Blocks {
		for _, x := range shares {
			if x.Begin == x.End {
				continue // the block only writes zeros
			}
			output := (x.Sequence*p.kvHeads+x.Head)*blocks + x.Block
			s.Workers[b] = append(s.Workers[b], piece{output, x.Begin, x.End, x.Tiles})
		}
		if len(s.Workers[b]) > 0 {
			working++
		}
	}
	s.note = fmt.Sprintf("%s, %d of %d blocks work", l.Entry, working, len(l.Blocks))
	switch {
	case l.Hybrid:
		s.note += ", hybrid"
	case s.partials() == 0:
		s.note += ", nothing is cut"
	}
	return s, nil
}
