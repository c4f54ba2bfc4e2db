package ongpu

import (
	"errors"
	"fmt"

	"gorgonia.org/leanattention/internal/gpu/layers"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/queue"
)

// InOperand returns an error of an operand.
func InOperand(name string, err error) error { return &OperandError{name, err} }

// OperandError is the error of an unusable operand.
type OperandError struct {
	name string
	err  error
}

func (e *OperandError) Error() string { return e.name + ": " + e.err.Error() }

// EngineError returns an error of work on a GPU. Operands were checked before: an error that is neither the driver's
// nor a tensor's is a defect.
func EngineError(op, what string, err error) error {
	var driver *cuda.Error
	var operand *OperandError
	switch {
	case errors.As(err, &operand):
		return TensorError(op, operand.name, operand.err)
	case errors.Is(err, queue.ErrShared):
		return errs.Errorf(op, errs.ErrUnsupported, "%s: %v", what, err)
	case errors.As(err, &driver), errors.Is(err, cuda.ErrClosed), errors.Is(err, cuda.ErrOutOfMemory), errors.Is(err, queue.ErrRank), errors.Is(err, layers.ErrNoAnswer):
		return Error(op, err)
	}
	return errs.Errorf(op, errs.ErrInternal, "%s: %v", what, err)
}

// TensorError is Error for the errors of a tensor's memory.
func TensorError(op, name string, err error) error {
	var sharded *shardedError
	switch {
	case errors.As(err, &sharded):
		return errs.Errorf(op, errs.ErrUnsupported, "%s is %v", name, sharded)
	case errors.Is(err, queue.ErrFreed):
		return errs.Errorf(op, errs.ErrClosed, "%s was freed", name)
	case errors.Is(err, errTensorCopied):
		return errs.Errorf(op, errs.ErrState, "%s %v", name, err)
	case errors.Is(err, queue.ErrOverwritten):
		return errs.Errorf(op, errs.ErrState, "%s is overwritten: its node has run again since", name)
	}
	return Error(op, err)
}

// Error wraps an error of the driver. The driver's error matches its sentinels; Error adds this module's sentinels.
func Error(op string, err error) error {
	switch {
	case errors.Is(err, cuda.ErrClosed):
		return errs.Errorf(op, errs.ErrClosed, "the GPU")
	case errors.Is(err, queue.ErrRecording), errors.Is(err, cuda.ErrNoPeerAccess):
		return errs.Errorf(op, errs.ErrUnsupported, "%v", err)
	}
	return fmt.Errorf("leanattention: %s: %w", op, err)
}

// shardedError is returned for a sharded tensor in place of a whole one.
type shardedError struct {
	axis int
	gpu  *GPU
}

func (e *shardedError) Error() string {
	return fmt.Sprintf("sharded on axis %d over %v", e.axis, e.gpu)
}

// WithinRecord returns the error of a call that the function of Record must not make.
func WithinRecord(op string, g *GPU) error {
	return errs.Errorf(op, errs.ErrState, "%v is recording: call it before or after GPU.Record", g)
}
