// Package kvstore has the pages of a cache: their memory, in the host or on GPUs, and the runs of layers on them. Which sequence holds
// which page is the affair of package pages.
package kvstore

import (
	"fmt"
	"math"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"
	"gorgonia.org/leanattention/internal/queue"
)

// Store is where the pages of a cache live: memory of the host, or of a GPU.
// Layers compute where their pages are. What pages mean, and who holds them, is
// the cache's affair.
type Store interface {
	Where() string
	// Places is how many places pages are dealt out to: page i is in place i mod places.
	Places() int
	// Supports refuses a geometry that layers can't have here.
	Supports(op string, g *attn.Problem) error
	// Operands describes q, k and v of a run, and the sinks if there are any, if layers can use them where they are.
	Operands(op string, in []G.Value) ([4]operand.Operand, error)
	// CopyPages copies pages of all layers, before what is computed next.
	CopyPages(op string, copies []Copy) error
	// MoveSlots copies tokens of all layers within their pages, one after the other, before what is
	// computed next.
	MoveSlots(op string, moves []Move) error
	// Transfer copies between pages of one layer and memory of the caller: to the
	// pages if in is set. It is behind what was computed before, and done when it
	// returns.
	Transfer(op string, t *Transfer, in bool) error
	// NewPlan is a plan for layers of g in steps of up to so many rows.
	NewPlan(rows int, g attn.Problem) Plan
	// Close gives up the memory. No call runs, and none will.
	Close() error
}

// Copy copies page from to page to.
type Copy struct{ To, From int32 }

// Move copies all that pages have of a token to the place of another one.
type Move struct{ To, From Slot }

// Slot is where a token lies.
type Slot struct {
	Page int32
	Slot int
}

// bytes are where the slots of a move lie in a slab, for one of the heads of its pages of size tokens.
func (m Move) bytes(s attn.Slab, head, heads, size int) (to, from, n int) {
	n = s.Row * s.DType.Size()
	at := func(p Slot) int { return ((int(p.Page)*heads+head)*size + p.Slot) * n }
	return at(m.To), at(m.From), n
}

// Transfer is a part of a slab of a layer, and memory for it, in the order of the spans.
type Transfer struct {
	Layer  int
	Slab   attn.Slab
	Spans  []Span
	Memory []byte
}

// Span is N bytes of a slab.
type Span struct{ At, N int }

// Plan is the schedule for the layers of one geometry, step after step.
type Plan interface {
	// Build plans the sequences of a step of so many rows. It keeps seqs.
	Build(op string, seqs []attn.Sequence, rows int) error
	// Attend appends k and v to a layer, and attends to it. lse is nil unless the call
	// wants it.
	Attend(op string, c *Call) (out, lse G.Value, err error)
}

// Node is the node that runs a layer.
type Node interface {
	fmt.Stringer
	// Record notes the node's work in the recording that is being made, if any.
	Record(sub *queue.Submission, s Schedule)
}

// Schedule is the work of a layer as a recording has it.
type Schedule interface {
	// Keep has the launches of later steps look as now, as far as sharing prefixes goes: they are in a recording.
	Keep()
	// Generation changes when launches look different: a recording of them is not right any more.
	Generation() uint64
	// Unfit is why the schedule does not do what the step has; nil: it does.
	Unfit() error
}

// Call is a run of a layer.
type Call struct {
	Node  Node
	Layer int
	Rows  Rows
	QKV   []G.Value // query, key and value, as operands has seen them

	Sinks  G.Value       // with them; nil: there are none
	LSE    bool          // the log-sum-exp is wanted
	Out    *ongpu.Tensor // takes the output, on the GPU of qkv; nil: a new value does
	Memory *ongpu.Node   // of new outputs and log-sum-exps on a GPU
}

// LayerNames are the names of a layer's inputs.
var LayerNames = [...]string{"q", "k", "v", "sinks"}

// Config is what a store of pages needs to know of a cache.
type Config struct {
	Layers, KVHeads, PageSize, Pages int
	Format                           attn.Format // of a page of all heads
	Window, SinkTokens               int
	Device                           *ongpu.GPU
	Shard                            Sharding
}

// Sharding is how the pages of a cache are shared out to several GPUs.
type Sharding uint8

const (
	shardAuto Sharding = iota // by KV heads as far as they go, by context for the rest
	shardHeads
	shardContext
)

// Check refuses pages that no cache can have. Errors wrap errs.ErrUnsupported.
func (c *Config) Check(op string) error {
	for _, p := range c.Format.Planes {
		switch p.Scales {
		case attn.NoScales, attn.ScalesByToken, attn.ScalesByGroup:
		default: // tokens move between pages, and pages are filled token by token
			return errs.Errorf(op, errs.ErrUnsupported, "a cache of %v with %v; scales are those of tokens, or of groups of columns", p.DType, p.Scales)
		}
	}
	return nil
}

// Bytes is the memory of all pages, and that of the largest slab of a layer; math.MaxInt where that is no int.
func (c *Config) Bytes() (all, largest int) {
	sum := 0
	for s := range c.Format.Slabs {
		n := attn.Product(c.Pages, s.PageBytes(c.KVHeads, c.PageSize))
		largest = max(largest, n)
		if sum += n; sum < 0 {
			sum = math.MaxInt
		}
	}
	return attn.Product(sum, c.Layers), largest
}
