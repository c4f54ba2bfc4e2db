// Package kvstore stores the pages of a cache, in host memory or on GPUs, and runs layers on the pages. Package pages knows which
// sequence holds which page.
package kvstore

import (
	"fmt"
	"math"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"
	"gorgonia.org/leanattention/internal/queue"
	"gorgonia.org/leanattention/internal/variant"
)

// Store is the memory of a cache's pages, on the host or on GPUs. Layers compute where their pages are. The cache assigns pages to
// sequences.
type Store interface {
	Where() string
	// Shards returns the number of context shards. Page i is in shard i mod Shards.
	Shards() int
	// Supports returns an error for a geometry that no layer can have here.
	Supports(op string, g *attn.Problem) error
	// Operands describes q, k, v and, if present, the sinks of a run. It returns an error if a layer can't read an operand where the
	// operand is.
	Operands(op string, in []G.Value) ([4]operand.Operand, error)
	// CopyPages copies pages in all layers, before the next computation.
	CopyPages(op string, copies []Copy) error
	// MoveSlots copies tokens between slots in all layers, in order, before the next computation.
	MoveSlots(op string, moves []Move) error
	// Transfer copies between pages of one layer and memory of the caller: to the pages if in is true. The copy comes after all
	// computation before the call, and is complete when Transfer returns.
	Transfer(op string, t *Transfer, in bool) error
	// NewPlan returns a plan for layers of geometry g in steps of at most rows rows.
	NewPlan(rows int, g attn.Problem) Plan
	// Close frees the memory. The caller has ended all other calls.
	Close() error
}

// Copy copies page from to page to.
type Copy struct{ To, From int32 }

// Move copies all that pages have of a token from one slot to another.
type Move struct{ To, From Slot }

// Slot is the page of a token, and the token's index in the page.
type Slot struct {
	Page int32
	Slot int
}

// bytes returns the offsets of the two slots in a slab, and the bytes of a token there, for one head. Pages have size tokens of heads
// heads.
func (m Move) bytes(s attn.Slab, head, heads, size int) (to, from, n int) {
	n = s.Row * s.DType.Size()
	at := func(p Slot) int { return ((int(p.Page)*heads+head)*size + p.Slot) * n }
	return at(m.To), at(m.From), n
}

// Transfer is a part of a slab of a layer, and memory for the part. Memory has the bytes of all spans in order.
type Transfer struct {
	Layer  int
	Slab   attn.Slab
	Spans  []Span
	Memory []byte
}

// Span is N bytes of a slab, from At on.
type Span struct{ At, N int }

// Plan schedules the layers of one geometry, step after step.
type Plan interface {
	// Build plans a step of rows rows. The plan keeps seqs.
	Build(op string, seqs []attn.Sequence, rows int) error
	// Attend appends k and v to a layer, and attends to the layer's keys and values. lse is nil unless c.LSE is true.
	Attend(op string, c *Call) (out, lse G.Value, err error)
}

// Node is the node that runs a layer.
type Node interface {
	fmt.Stringer
	// Record adds the node's work to the recording in progress, if there is one.
	Record(sub *queue.Submission, s Schedule)
}

// Schedule is the work of a layer, as a recording holds the work.
type Schedule interface {
	// Keep fixes whether later steps share prefixes, because the launches are in a recording.
	Keep()
	// Generation changes when the form of the launches changes, which makes a recording of the launches stale.
	Generation() uint64
	// Unfit returns why the schedule can't run the step; nil if the schedule can.
	Unfit() error
}

// Call is a run of a layer.
type Call struct {
	Node  Node
	Layer int
	Rows  Rows
	QKV   []G.Value // query, key and value, which Operands has checked

	Sinks   G.Value          // nil: none
	Values  []G.Value        // tensors of the layer's variant
	Tensors []variant.Tensor // the same in host memory
	There   []*ongpu.Tensor  // the same on the GPU of QKV
	LSE     bool             // whether to return the log-sum-exp
	Entropy *G.Value         // receives the entropies of weights; nil: not wanted
	Mass    *G.Value         // receives attention mass by LeanTiles; nil: not wanted
	Places  int              // LeanTiles of a row that Mass has places for
	Out     *ongpu.Tensor    // receives the output, on the GPU of QKV; nil: Attend makes a new value
	Memory  *ongpu.Node      // of new outputs and log-sum-exps on a GPU
}

// LayerNames are the names of a layer's inputs.
var LayerNames = [...]string{"q", "k", "v", "sinks"}

// Config is the part of a cache's configuration that a store reads.
type Config struct {
	Layers, KVHeads, PageSize, Pages int
	Format                           attn.Format // of a page of all heads
	Edge                             attn.Format // of such a page of the first EdgeLayers layers, and the last
	EdgeLayers                       int         // 0 on GPUs
	KeyScales, ValueScales           []float32   // of all layers' KV heads, with scales of heads; nil: 1
	Window, SinkTokens               int
	Device                           *ongpu.GPU
	Shard                            Sharding
}

// Sharding says how several GPUs share the pages of a cache.
type Sharding uint8

const (
	shardAuto Sharding = iota // by KV head as far as their number divides, by context for the rest
	shardHeads
	shardContext
)

// Bytes returns the bytes of all pages, and of the largest slab of a layer. A number that is no int is math.MaxInt.
func (c *Config) Bytes() (all, largest int) {
	for _, of := range [...]struct {
		format *attn.Format
		layers int
	}{{&c.Format, c.Layers - 2*c.EdgeLayers}, {&c.Edge, 2 * c.EdgeLayers}} {
		if of.layers == 0 {
			continue
		}
		for s := range of.format.Slabs {
			n := attn.Product(c.Pages, s.PageBytes(c.KVHeads, c.PageSize))
			largest = max(largest, n)
			if all += attn.Product(n, of.layers); all < 0 {
				all = math.MaxInt
			}
		}
	}
	return all, largest
}

// FormatOf returns the format of a page of a layer.
func (c *Config) FormatOf(layer int) *attn.Format {
	if layer < c.EdgeLayers || layer >= c.Layers-c.EdgeLayers {
		return &c.Edge
	}
	return &c.Format
}
