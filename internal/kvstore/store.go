// Package kvstore has the pages of a cache: their memory, in the host or on GPUs, and the runs of layers on them. Which sequence holds
// which page is the affair of package pages.
package kvstore

import (
	"fmt"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/leanattention/internal/attn"
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

// Move copies a token's keys and values to the place of another one.
type Move struct{ To, From Slot }

// Slot is where a token lies.
type Slot struct {
	Page int32
	Slot int
}

// bytes are where the places of a move lie in a layer's keys or values, of which a page has so many bytes, for each head.
func (m Move) bytes(head, heads, size, page int) (to, from, n int) {
	n = page / heads / size
	at := func(p Slot) int { return int(p.Page)*page + (head*size+p.Slot)*n }
	return at(m.To), at(m.From), n
}

// Transfer is some of the keys (or values) of a layer, and memory for them, in
// the order of the spans.
type Transfer struct {
	Layer  int
	Values bool
	Spans  []Span
	Memory []byte
}

// Span is n bytes of a layer's keys or values.
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
	Storage                          attn.DType
	KeyElements, ValueElements       int // of a layer
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
