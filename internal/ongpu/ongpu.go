// Package ongpu has GPUs and the tensors on them as ops see them: memory, queues and engines of a GPU, the work of a node, and
// the memory that nodes of a graph share on a GPU and in host memory. Package device is its public face.
package ongpu

import (
	"sync"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/decoder"
	"gorgonia.org/leanattention/internal/queue"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Node is what a node keeps on the GPUs that it computes on: the memory of its
// value, and of what it needs on the way there; and its value in host memory while that is to be shared. Ops hold one by a pointer, since
// clones of a graph share ops.
type Node struct {
	// Reads is how many nodes read a value, and no others do: the last of them gives its
	// memory to other values. 0: the value stays until the node runs again.
	Reads int

	// From are the nodes whose values, or parts of them, are the inputs, where these are counted; nil for the others.
	From []*Node

	mu   sync.Mutex
	of   map[*queue.Group][]*NodeMemory // of each member
	host hostValue
}

// NodeMemory is what a node has on a GPU.
type NodeMemory struct {
	Value  queue.Slot
	Rest   queue.Slot // what the value comes by, or a second value: the log-sum-exp
	Turned queue.Slot // queries that attention has turned
	inputs []*queue.Slot
}

// Input is the memory of what input i is made into for the node: a whole one, or a copy of it.
func (m *NodeMemory) Input(i int) *queue.Slot {
	for len(m.inputs) <= i {
		m.inputs = append(m.inputs, new(queue.Slot))
	}
	return m.inputs[i]
}

// On is the memory on a member of a group of GPUs.
func (n *Node) On(g *queue.Group, member int) *NodeMemory {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.of[g] == nil {
		for g := range n.of {
			if g.Closed() { // a node may see many GPUs come and go
				delete(n.of, g)
			}
		}
		if n.of == nil {
			n.of = make(map[*queue.Group][]*NodeMemory)
		}
		for range g.Len() {
			n.of[g] = append(n.of[g], new(NodeMemory))
		}
	}
	return n.of[g][member]
}

// Op is an op that computes through [Compute], or tells as it does when it has read its
// inputs.
type Op interface{ OnGPU() *Node }

// PartOp is an op whose value is a part of its input's, through [Part].
type PartOp interface{ IsPart() }

// Call is the work of one run of a node.
type Call struct {
	Op    string // as errors name it
	Node  *Node
	Names []string // of In
	In    []G.Value

	// The value to make.
	DType tensor.Dtype
	Shape tensor.Shape

	// Scratch is how many float32 the work needs besides; nil for none.
	Scratch func(*decoder.Engine) (int, error)

	// Queue queues the work.
	Queue func(*Work) error

	// Spread is the work where some inputs are dealt out over the members of a group; nil: it takes whole ones
	// alone. The inputs' memory is there, and the output's; in what of them it refuses errors are the op's.
	Spread func(in []Operand, out gpu.Memory) (Spread, error)

	// Apart says how the members of a group can each do their part of the work with what they have of the inputs, without
	// waiting for each other; nil: they can't. A nil func: where they have all inputs whole, each does all of
	// it.
	Apart func(in []Layout) (*Apart, error)
}

// Layout is where the members of a group have an input.
type Layout struct {
	Replicated bool // each has all of it
	Sharded    bool // each has some indices of the axis: as many, if they can be dealt out so
	Axis       int
	Members    int
}

// Evenly is what each member has of n indices, if all have as many.
func (l Layout) Evenly(n int) (each int, ok bool) { return n / l.Members, n%l.Members == 0 }

// Whole says whether the first member alone has it.
func (l Layout) Whole() bool { return !l.Replicated && !l.Sharded }

// Apart is work that each member of a group does with what it has.
type Apart struct {
	// Replicate are the inputs that are to be replicated first.
	Replicate []bool

	// The value's layout, and each member's shape of it. Joined is a vector of parts that lie one behind the other, of
	// which each member has an equal share of each.
	Layout Layout
	Joined bool
	Shape  tensor.Shape

	// Scratch is how many float32 a member needs besides; nil for none.
	Scratch func(member int, d *decoder.Engine) (int, error)

	// Queue queues a member's work.
	Queue func(member int, w *Work) error

	// Sum: what the members have queued are partial sums of the value, which is to be their sum.
	Sum bool

	// Meet queues what a member does together with the others behind Queue, which is nil where there is nothing before: all
	// of them do the same at the same time, through x. nil: they do not meet.
	Meet func(x *decoder.Exchange, member int, all []*Work) error
}

// MostMembers is how many members of a group can meet.
const MostMembers = decoder.MostMembers

// Each is the work of all members that have all inputs whole.
func (c *Call) Each() *Apart {
	a := &Apart{Layout: Layout{Replicated: true}, Shape: c.Shape, Queue: func(_ int, w *Work) error { return c.Queue(w) }}
	if c.Scratch != nil {
		a.Scratch = func(_ int, d *decoder.Engine) (int, error) { return c.Scratch(d) }
	}
	return a
}

// Spread is work of all members of a group: of the first one before, of all at once, and of the first one after.
type Spread interface {
	// Needs is how many float32 a member needs besides.
	Needs(member int, d *decoder.Engine) (int, error)
	// Take gives each member that memory.
	Take(scratch []gpu.Memory)
	Before(*Work) error
	On(member int, w *Work) error
	After(*Work) error
}

// LinearShards is linear layers whose weights are dealt out.
type LinearShards struct{ *decoder.Sharded }

func (l LinearShards) Needs(member int, d *decoder.Engine) (int, error) {
	return d.ShardScratch(l.Sharded, member)
}

func (l LinearShards) Take(scratch []gpu.Memory) { l.Sharded.Scratch = scratch }

func (l LinearShards) Before(w *Work) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.BeforeShards(s, l.Sharded) })
}

func (l LinearShards) On(member int, w *Work) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.Shard(s, l.Sharded, member) })
}

func (l LinearShards) After(w *Work) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.AfterShards(s, l.Sharded) })
}

// Work is where a call's work is queued, and on what.
type Work struct {
	*decoder.Engine
	*queue.Submission
	In           []Operand
	Out, Scratch gpu.Memory
}

// Linear queues linear layers, in a recording as a part of a megakernel where they can
// be one.
func (w *Work) Linear(o *decoder.Linear) error {
	if taken, err := w.chained(o); taken || err != nil {
		return err
	}
	return w.Do(func(s *cuda.Stream) error { return w.Engine.Linear(s, o) })
}

func (w *Work) chained(o *decoder.Linear) (bool, error) {
	if !w.Recording() {
		return false, nil
	}
	if c, ok := w.Deferred().(*decoder.Megakernel); ok && c.Linear(o) {
		return true, nil
	}
	// What can't be put behind the megakernel that there is may begin another, which may do
	// what is put off before it, or make new keys and values.
	if g, ok := w.Deferred().(*decoder.Gathers); ok {
		if c := w.NewMegakernel(); c != nil && c.Gather(g) && c.Linear(o) {
			w.Replace(c)
			return true, nil
		}
	}
	if c := w.NewMegakernel(); c != nil && c.Linear(o) {
		return true, w.PutOff(c)
	}
	if p := w.NewProjection(o); p != nil {
		return true, w.PutOff(p)
	}
	return false, nil
}

// Gather queues rows of a table, in a recording with those that are added to them.
func (w *Work) Gather(o *decoder.Gather) error {
	if w.Recording() {
		if g, ok := w.Deferred().(*decoder.Gathers); ok && g.Then(o) {
			return nil
		}
		if g := w.NewGathers(o); g != nil {
			return w.PutOff(g)
		}
	}
	return w.Do(func(s *cuda.Stream) error { return w.Engine.Gather(s, o) })
}

// RMSNorm queues norms by the root mean square.
func (w *Work) RMSNorm(o *decoder.RMSNorm) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.RMSNorm(s, o) })
}

// Rotary queues a rotary embedding.
func (w *Work) Rotary(o *decoder.Rotary) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.Rotary(s, o) })
}

// Elements queues functions, products and sums of elements.
func (w *Work) Elements(o *decoder.Elements) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.Elements(s, o) })
}

// MergeStates queues the merging of states of attention.
func (w *Work) MergeStates(o *decoder.States) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.MergeStates(s, o) })
}

// Move queues elements taken from one place to another.
func (w *Work) Move(o *decoder.Move) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.Move(s, o) })
}

// Sample queues the choice of a token for each row of logits, in a recording as the end
// of the megakernel that makes them, where it can be that.
func (w *Work) Sample(o *decoder.Samples) error {
	if c, ok := w.Deferred().(*decoder.Megakernel); ok && c.Choose(o) {
		return nil
	}
	return w.Do(func(s *cuda.Stream) error { return w.Sampler.Run(s, o) })
}

// Operand is the memory of an input.
type Operand struct {
	gpu.Memory
	Fixed  bool    // nothing that is queued writes it
	Axis   int     // that is dealt out
	Shards []Shard // of each member; nil: it is whole
}

// Shard is what a member has of an input: so many indices of the axis from one on.
type Shard struct {
	gpu.Memory
	First, N int
}

// Collective is work that all ranks do together.
type Collective int

const (
	// Sum is the sum of all ranks' inputs.
	Sum Collective = iota
	// Broadcast is one rank's input.
	Broadcast
)

// Comm is a communicator of several ranks.
type Comm interface {
	// Queue queues a collective of the first input, of n elements of 32 bits, to the output. from is the rank of a
	// broadcast.
	Queue(w *Work, c Collective, n, from int) error
}

// CopyOp is an op that copies its input to a GPU, or else from one.
type CopyOp interface{ ToGPU() bool }
