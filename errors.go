package leanattention

import (
	"errors"
	"fmt"
	"strings"

	"gorgonia.org/leanattention/internal/errs"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/queue"
	"gorgonia.org/tensor"
)

// Every error of this package wraps one of these errors, for errors.Is. The text names the operation, the argument and the values. All
// arguments are checked before anything is written.
//
// Gorgonia's tape machine wraps the error of a run in an error that does not unwrap. [Cause] returns the error inside:
//
//	err := leanattention.Cause(machine.RunAll())
//	if errors.Is(err, leanattention.ErrLength) { ... }
var (
	// ErrShape: an argument has a wrong rank, size or head count.
	ErrShape = errs.ErrShape

	// ErrDType: an argument has an element type that the operation does not take.
	ErrDType = errs.ErrDType

	// ErrLength: a length or a number of tokens is out of range, or the lengths of a batch do not determine the positions of its
	// queries.
	ErrLength = errs.ErrLength

	// ErrOption: an option has a value out of range, or is given twice.
	ErrOption = errs.ErrOption

	// ErrUnsupported: this path does not support an option, a combination or an operand. No option is ignored.
	ErrUnsupported = errs.ErrUnsupported

	// ErrCacheFull: the cache has too few free pages now, and nothing changed. Release or truncate sequences, and try again.
	// [Cache.Need] returns the number of pages of a step. A step that can never fit is ErrLength.
	ErrCacheFull = errs.ErrCacheFull

	// ErrFormat: data is not a saved sequence, is damaged, or ends too early.
	ErrFormat = errs.ErrFormat

	// ErrState: a call out of order, such as a step that is not set, a sequence in an open step, a commit before all layers have
	// run, or a GPU value whose node has run again. Under the build tag cuda, also a machine of Gorgonia that is closed, whose
	// set-up failed, or whose earlier call failed.
	ErrState = errs.ErrState

	// ErrClosed: use of a closed cache or GPU, of a released sequence, or of a freed tensor.
	ErrClosed = errs.ErrClosed

	// ErrGraph: a node that Gorgonia would compute wrongly, or would refuse.
	ErrGraph = errs.ErrGraph

	// ErrNoDevice: a GPU can't be opened. The text has the reason:
	//
	//   - no NVIDIA driver: there are drivers for Linux and Windows, on amd64 and arm64
	//   - a driver older than release 525 (CUDA 12.0)
	//   - no GPU of this ordinal
	//   - a GPU below compute capability 8.0
	ErrNoDevice = cuda.ErrNoDevice

	// ErrRank: one of several processes that compute together (package ranks) has failed, which ends the work of all. The text has
	// the rank and the reason.
	ErrRank = queue.ErrRank

	// ErrNoAnswer: a GPU did not answer the GPUs that were opened with it. The text names the GPU. Results since then are
	// undefined, and every later call returns the error: the GPUs can only be closed.
	ErrNoAnswer = layers.ErrNoAnswer

	// ErrOutOfMemory: the host or a GPU has too little memory, and nothing changed. The text has the device, the bytes that were
	// needed, and the bytes that are free.
	ErrOutOfMemory = cuda.ErrOutOfMemory

	// ErrInternal: a defect of this package, such as a recovered panic. Please report it with the text.
	ErrInternal = errs.ErrInternal
)

// Cause returns the error of an op from an error that a machine of Gorgonia returned. The machine's error does not unwrap, so
// errors.Is and errors.As do not see the op's error inside. The text is the op's, without the machine's instructions. Cause returns
// any other error, and nil, unchanged.
func Cause(err error) error {
	// The whole of what a machine's error has: others have an Err of their own,
	// some of them one that returns the very same error.
	var machine interface {
		Err() error
		Node() *G.Node
		InstructionID() int
	}
	for errors.As(err, &machine) { // an op may run a machine of its own
		inner := machine.Err()
		if inner == nil {
			return err
		}
		err = inner
	}
	// Machines wrap an op's error by github.com/pkg/errors, with their instructions as text.
	own := err
	for layer := (interface{ Cause() error })(nil); errors.As(own, &layer) && layer.Cause() != nil; {
		own = layer.Cause()
	}
	if own != nil && strings.HasPrefix(own.Error(), "leanattention: ") {
		return own
	}
	return err
}

// pagesError returns the error of a call of the pool. Calls are checked before, so it is a defect.
func pagesError(op string, err error) error { return errs.Errorf(op, ErrInternal, "pages: %v", err) }

// text returns the shape of a cache, in a line.
func (c *CacheConfig) text() string {
	values := ""
	switch {
	case c.ValuesInKeys:
		values = fmt.Sprintf(" with values of %d in them", c.ValueDim)
	case c.ValueDim != 0 && c.ValueDim != c.HeadDim:
		values = fmt.Sprintf(" and %d", c.ValueDim)
	}
	where, t := errs.Host, tensor.Float32
	if c.Device != nil {
		where = c.Device.String()
	}
	if c.DType.Type != nil {
		t = c.DType
	}
	size := c.PageSize
	if size == 0 {
		size = defaultPageSize
	}
	window := ""
	if c.Window != 0 {
		window = fmt.Sprintf(", a window of %d keys", c.Window)
	}
	if c.SinkTokens != 0 {
		window += fmt.Sprintf(" and %d sink tokens", c.SinkTokens)
	}
	if c.Rewind != 0 {
		window += fmt.Sprintf(" and %d more to rewind", c.Rewind)
	}
	if c.Shard != ShardAuto {
		window += fmt.Sprintf(", %v", c.Shard)
	}
	return errs.Singular(fmt.Sprintf("%d layers of %d pages of %d tokens, %d KV heads of %d%s, %v, in %s%s",
		c.Layers, c.Pages, size, c.KVHeads, c.HeadDim, values, t, where, window))
}

// String returns the cache's configuration, its [CacheStats] and its bytes, in a line.
func (c *Cache) String() string {
	if c.made("") != nil {
		return "cache that was not made by NewCache"
	}
	c.mu.Lock()
	closed := c.closed
	c.mu.Unlock()
	if closed {
		return fmt.Sprintf("closed cache of %s", c.config.text())
	}
	s := c.Stats()
	return errs.Singular(fmt.Sprintf("cache of %s: %d tokens of %d sequences, %d of %d pages free, %d shared, %s",
		c.config.text(), s.Tokens, s.Sequences, s.FreePages, c.config.Pages, s.Shared, errs.ByteCount(c.bytes)))
}

// String returns the sequence's length, in a line.
func (s *Sequence) String() string {
	if s.made("") != nil {
		return "sequence that was not made by NewSequence or Fork"
	}
	c := s.cache
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case s.released:
		return "released sequence"
	case c.closed:
		return "sequence of a closed cache"
	}
	open := ""
	if s.step != nil {
		open = ", part of an open step"
	}
	gone := ""
	if gap := s.table.Gap; gap.End > 0 {
		gone = fmt.Sprintf(" but for [%d, %d)", gap.First, gap.End)
	}
	return errs.Singular(fmt.Sprintf("sequence of %d tokens%s in %d pages%s", s.table.Tokens, gone, len(s.table.Pages), open))
}

// String describes the assignment of the step's rows, in a line.
func (s *Step) String() string {
	if s.made("") != nil {
		return "step that was not made by NewStep"
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.open {
		return errs.Singular(fmt.Sprintf("step of %d rows, not set", s.tokens))
	}
	rows := 0
	for _, seq := range s.sequences {
		rows += seq.Queries
	}
	return errs.Singular(fmt.Sprintf("step of %d rows, set: %d rows of %d sequences", s.tokens, rows, len(s.sequences)))
}

// String returns the layer's index and its step, in a line.
func (l Layer) String() string { return fmt.Sprintf("layer %d of a %v", l.index, l.step) }

// String returns the name of the function that made the option.
func (o Option) String() string { return o.kind.String() }
