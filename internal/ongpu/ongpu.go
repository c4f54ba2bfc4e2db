// Package ongpu has GPUs and the tensors on them for ops: memory, queues and engines of a GPU, the work of a node,
// and the memory that nodes of a graph share, on a GPU and on the host. Package device is its public face.
package ongpu

import (
	"sync"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/queue"
	"gorgonia.org/leanattention/internal/weight"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Node is the state of a node on the GPUs that compute it: the memory of its value and of steps before it, and a
// shared value in host memory. Ops hold a pointer to their Node, since clones of a graph share ops.
type Node struct {
	// Reads is the number of readers of a value that has no other readers: the last reader frees the memory for other
	// values. 0: the value stays until the node runs again.
	Reads int

	// Shares is set in a graph whose values share memory. Scratch memory of the node is then free for later nodes.
	Shares bool

	// From has the nodes whose values, or parts of them, are inputs with counted readers; nil for other inputs.
	From []*Node

	mu   sync.Mutex
	of   map[*queue.Group][]*NodeMemory // one for each member
	host hostValue
}

// NodeMemory is a node's memory on a GPU.
type NodeMemory struct {
	Value   queue.Slot
	Rest    queue.Slot // memory of steps before the value, or of a second value: the log-sum-exp
	Rotated queue.Slot // queries after the rotary embedding
	Entropy queue.Slot // of attention, and Mass
	Mass    queue.Slot
	inputs  []*queue.Slot
}

// Input returns the slot for a copy of input i, or for its parts gathered.
func (m *NodeMemory) Input(i int) *queue.Slot {
	for len(m.inputs) <= i {
		m.inputs = append(m.inputs, new(queue.Slot))
	}
	return m.inputs[i]
}

// On returns the memory on a member of a group of GPUs.
func (n *Node) On(g *queue.Group, member int) *NodeMemory {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.of[g] == nil {
		for g := range n.of {
			if g.Closed() { // GPUs may come and go during a node's life
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

// Op is an op that computes through [Compute], or reports its reads as Compute does.
type Op interface{ OnGPU() *Node }

// PartOp is an op whose value on a GPU is a part of the first input, through [Part]. The op does not read other inputs. A PartOp that is also
// an [Op] copies the part in host memory, and reports through [Node.Copied].
type PartOp interface{ IsPart() }

// FirstOp is an op that reads the first input alone.
type FirstOp interface{ ReadsFirst() }

// StatefulOp is an op with state of its runs. Again returns a copy without state, for another node.
type StatefulOp interface{ Again() G.Op }

// Call is the work of one run of a node.
type Call struct {
	Op    string // as in errors
	Node  *Node
	Names []string // names of In
	In    []G.Value

	// DType is the element type of the value.
	DType tensor.Dtype
	Shape tensor.Shape

	// Scratch returns how many float32 the work needs besides; nil: none.
	Scratch func(*layers.Engine) (int, error)

	// Queue queues the work.
	Queue func(*Work) error

	// Spread returns the work if some inputs are sharded over the members of a group; nil: the work takes whole
	// inputs alone. The memory of inputs and output exists. Refusals are errors of the op.
	Spread func(in []Operand, out gpu.Memory) (Spread, error)

	// PerGPU returns how the members of a group each do a part of the work in per-GPU mode, with their parts of the
	// inputs; nil: they can't. Without the function, each member does all of the work if all inputs are replicated.
	PerGPU func(in []Layout) (*PerGPU, error)
}

// Layout says which members of a group have an input.
type Layout struct {
	Replicated bool // each member has all of it
	Sharded    bool // each member has some indices of the axis, equally many if they divide evenly
	Axis       int
	Members    int
}

// Evenly returns each member's share of n indices. ok is false if n does not divide evenly.
func (l Layout) Evenly(n int) (each int, ok bool) { return n / l.Members, n%l.Members == 0 }

// Whole reports whether the first member alone has the input.
func (l Layout) Whole() bool { return !l.Replicated && !l.Sharded }

// PerGPU is work in per-GPU mode: each member of a group works on its own parts.
type PerGPU struct {
	// Replicate marks the inputs that are to be replicated first.
	Replicate []bool

	// Layout is the value's layout, and Shape each member's shape. Joined means a vector of consecutive parts, of
	// which each member has an equal share.
	Layout Layout
	Joined bool
	Shape  tensor.Shape

	// Scratch returns how many float32 a member needs besides; nil: none.
	Scratch func(member int, d *layers.Engine) (int, error)

	// Queue queues a member's work.
	Queue func(member int, w *Work) error

	// Sum: the members' results are partial sums of the value.
	Sum bool

	// Meet queues the members' common work after Queue, which may be nil. All members do the same at the same time,
	// through x. nil: no common work.
	Meet func(x *layers.Exchange, member int, all []*Work) error
}

// MostMembers is the largest number of members with common work.
const MostMembers = layers.MostMembers

// Each returns the work of members that have all inputs replicated.
func (c *Call) Each() *PerGPU {
	a := &PerGPU{Layout: Layout{Replicated: true}, Shape: c.Shape, Queue: func(_ int, w *Work) error { return c.Queue(w) }}
	if c.Scratch != nil {
		a.Scratch = func(_ int, d *layers.Engine) (int, error) { return c.Scratch(d) }
	}
	return a
}

// Spread is work of all members of a group: first of the first member, then of all at once, then of the first member.
type Spread interface {
	// Needs returns how many float32 a member needs besides.
	Needs(member int, d *layers.Engine) (int, error)
	// Take gives each member its scratch memory.
	Take(scratch []gpu.Memory)
	Before(*Work) error
	On(member int, w *Work) error
	After(*Work) error
}

// LinearShards is linear layers with sharded weights.
type LinearShards struct{ *layers.Sharded }

func (l LinearShards) Needs(member int, d *layers.Engine) (int, error) {
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

// Work has the queue and the operands of a call's work.
type Work struct {
	*layers.Engine
	*queue.Submission
	In           []Operand
	Out, Scratch gpu.Memory
}

// Linear queues linear layers. In a recording they become a part of the megakernel, if possible.
func (w *Work) Linear(o *layers.Linear) error {
	if taken, err := w.chained(o); taken || err != nil {
		return err
	}
	return w.Do(func(s *cuda.Stream) error { return w.Engine.Linear(s, o) })
}

func (w *Work) chained(o *layers.Linear) (bool, error) {
	if !w.Recording() {
		return false, nil
	}
	if c, ok := w.Deferred().(*layers.Megakernel); ok && c.Linear(o) {
		return true, nil
	}
	// A layer that can't follow the deferred megakernel may begin another one, which may do the deferred
	// work before it, or make new keys and values.
	if g, ok := w.Deferred().(*layers.Gathers); ok {
		if c := w.NewMegakernel(); c != nil && c.Gather(g) && c.Linear(o) {
			w.Replace(c)
			return true, nil
		}
	}
	if c := w.NewMegakernel(); c != nil && c.Linear(o) {
		return true, w.PutOff(c)
	}
	if p := w.NewProjection(o); p != nil { // not of weights of 8 or 4 bits
		return true, w.PutOff(p)
	}
	return false, nil
}

// Gather queues rows of a table, in a recording together with the rows that are added to them.
func (w *Work) Gather(o *layers.Gather) error {
	if w.Recording() {
		if g, ok := w.Deferred().(*layers.Gathers); ok && g.Then(o) {
			return nil
		}
		if g := w.NewGathers(o); g != nil {
			return w.PutOff(g)
		}
	}
	return w.Do(func(s *cuda.Stream) error { return w.Engine.Gather(s, o) })
}

// RMSNorm queues norms by the root mean square.
func (w *Work) RMSNorm(o *layers.RMSNorm) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.RMSNorm(s, o) })
}

// Rotary queues a rotary embedding.
func (w *Work) Rotary(o *layers.Rotary) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.Rotary(s, o) })
}

// Elements queues functions, products and sums of elements.
func (w *Work) Elements(o *layers.Elements) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.Elements(s, o) })
}

// Product queues a product of matrices.
func (w *Work) Product(o *layers.Product) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.Product(s, o) })
}

// ColumnSums queues sums over rows.
func (w *Work) ColumnSums(o *layers.ColumnSums) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.ColumnSums(s, o) })
}

// Slopes queues gradients of activations and gates.
func (w *Work) Slopes(o *layers.Slopes) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.Slopes(s, o) })
}

// NormGradient queues gradients of norms.
func (w *Work) NormGradient(o *layers.NormGradient) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.NormGradient(s, o) })
}

// Rounding queues the rounding of a gradient of layers' output.
func (w *Work) Rounding(o *layers.Rounding) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.Rounding(s, o) })
}

// RoundedX queues the gradient of x.
func (w *Work) RoundedX(o *layers.RoundedProducts) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.RoundedX(s, o) })
}

// RoundedW queues the gradient of w.
func (w *Work) RoundedW(o *layers.RoundedProducts) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.RoundedW(s, o) })
}

// AddParts queues sums of parts.
func (w *Work) AddParts(parts, n int, x, y gpu.Memory) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.AddParts(s, parts, n, x, y) })
}

// Convert queues a conversion to another element type.
func (w *Work) Convert(o *layers.Convert) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.Convert(s, o) })
}

// Loss queues a loss, or its gradients.
func (w *Work) Loss(o *layers.Loss) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.Loss(s, o) })
}

// TableGradient queues the gradient of an embedding's table.
func (w *Work) TableGradient(o *layers.TableGradient) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.TableGradient(s, o) })
}

// HeadLinear queues linear layers by heads.
func (w *Work) HeadLinear(o *layers.HeadLinear) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.HeadLinear(s, o) })
}

// MergeStates queues the merging of states of attention.
func (w *Work) MergeStates(o *layers.States) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.MergeStates(s, o) })
}

// Move queues copies of elements.
func (w *Work) Move(o *layers.Move) error {
	return w.Do(func(s *cuda.Stream) error { return w.Engine.Move(s, o) })
}

// Sample queues the choice of a token for each row of logits. In a recording the choice ends the megakernel
// that makes the logits, if possible.
func (w *Work) Sample(o *layers.Samples) error {
	if c, ok := w.Deferred().(*layers.Megakernel); ok && c.Choose(o) {
		return nil
	}
	return w.Do(func(s *cuda.Stream) error { return w.Sampler.Run(s, o) })
}

// Operand is the memory of an input.
type Operand struct {
	gpu.Memory
	Fixed  bool           // no queued work writes the memory
	Axis   int            // the sharded axis
	Shards []Shard        // one for each member; nil: the input is whole
	Packed *weight.Packed // nil: the input is elements in row-major order
}

// Shard is a member's part of an input: N indices of the axis from First on.
type Shard struct {
	gpu.Memory
	First, N int
	Packed   *weight.Packed // nil: the shard is elements in row-major order
}

// Collective is common work of all ranks.
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
	// Exchange sends a part to each rank, from host memory, and returns what each rank has sent. All ranks have the same label.
	Exchange(label string, parts [][]byte) (got [][]byte, err error)
}

// CopyOp is an op that copies its input to a GPU, or else from one.
type CopyOp interface{ ToGPU() bool }
