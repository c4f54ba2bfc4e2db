package device

import (
	"errors"
	"sync"

	"gorgonia.org/leanattention/internal/ongpu"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/nocopy"
	"gorgonia.org/leanattention/internal/queue"
)

// Recording is the work of a graph's run on a GPU, which [Recording.Replay] queues again as one. A decode step is a hundred
// launches or more, and a fast GPU executes them sooner than the host can queue them one by one.
//
// A Recording is used by its pointer. The use of a copy is ErrState.
type Recording struct {
	mark nocopy.Mark
	mu   sync.Mutex
	gpu  *GPU
	rec  *queue.Recording // nil: closed
}

// Record calls run, which runs a graph whose values are on the GPU, and keeps the queued work instead of executing it. The
// graph must have run before, so that its nodes have their memory:
//
//	step.Run(appends, machine.RunAll)                 // the first time
//	machine.Reset()
//	...
//	step.Set(appends)
//	recording, err := gpu.Record(machine.RunAll)      // the second time
//	machine.Reset()
//	recording.Replay()                                // Record has executed nothing yet
//	step.Commit()
//	...
//	for {
//		input.CopyFrom(tokens)
//		step.Run(appends, recording.Replay)           // from then on
//	}
//
// Package leanattention has Step, Cache, Sequence, Append and Attention.
//
//   - Results of a replay are in the values that the nodes had after Record.
//   - A replay reads the inputs again: [Tensor.CopyFrom] changes them. It also reads the lengths of a Step. Pages and graph are
//     those of the recording.
//   - Decode layers that make each other's inputs may become one launch, from compute capability 9.0 on: Linear and Linears of
//     package nn, and CachedAttention without WithRotary. The launch may begin with Embeddings and end with an ArgMax. It
//     adds in another order, so results differ from the machine's by rounding. All replays have the same bits.
//   - A recording of a step with a tree (Append.Parents) serves steps with trees and steps without. A recording of a step
//     without a tree serves steps without trees alone: Replay is ErrState for others. A decoder that runs both kinds of steps
//     may keep a recording of each.
//   - A graph with gradients is recorded in the same way. A solver of package nn steps between replays.
//   - On a cache that is sharded by context, a recording of a step with one new token a sequence serves such steps alone.
//   - If the step shared prefixes when Record ran, its replays do too. Otherwise that step never shares. Results are the same
//     but for rounding.
//
// No other goroutine may use the GPU while run runs. run may not call the following. The call returns the error at once:
//
//   - Close of the GPU or of a cache on the GPU, [Recording.Replay], Record: ErrState
//   - Set of a Step and Keep of a Sequence on the GPU: ErrState
//   - [GPU.Synchronize], WriteTo of a Sequence, ReadSequence of a Cache, [ToGPU], [ToHost], downloads, Attend, and Attention with
//     lengths, with dropout or on several GPUs: ErrUnsupported
func (g *GPU) Record(run func() error) (*Recording, error) {
	const op = "GPU.Record"
	if run == nil {
		return nil, errs.Errorf(op, errs.ErrState, "run is nil")
	}
	if err := g.Internal().Enter(op); err != nil {
		return nil, err
	}
	g.gpu.Group.Leave()
	var failed error
	rec, err := g.gpu.Group.Record(func() error {
		failed = run()
		return failed
	})
	switch {
	case err == nil:
		r := &Recording{gpu: g, rec: rec}
		r.mark.Set()
		return r, nil
	case failed != nil:
		return nil, failed // it tells more
	case errors.Is(err, queue.ErrRecording):
		return nil, errs.Errorf(op, errs.ErrState, "%v", err)
	}
	return nil, ongpu.Error(op, err)
}

// Replay queues the work again. If the work is not what the graph computes now, Replay returns ErrState and queues nothing:
// the step is not set, or sequences share so many more pages that a table of the step has grown. Run the graph then, and record
// it again.
//
// Errors: ErrState; ErrClosed if the recording, its cache, the GPU or a tensor of the recording was closed or freed.
func (r *Recording) Replay() error {
	const op = "Recording.Replay"
	if err := r.original(op); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.rec == nil {
		return errs.Errorf(op, errs.ErrClosed, "the recording")
	}
	if err := r.gpu.Internal().Enter(op); err != nil {
		return err
	}
	r.gpu.gpu.Group.Leave()
	err := r.rec.Replay()
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ongpu.ErrCacheClosed):
		return errs.Errorf(op, errs.ErrClosed, "a cache of it")
	case errors.Is(err, ongpu.ErrNotReady), errors.Is(err, queue.ErrRecording):
		return errs.Errorf(op, errs.ErrState, "%v", err)
	}
	return ongpu.TensorError(op, "a tensor of it", err)
}

// Close gives the recording back. Closing twice is harmless.
func (r *Recording) Close() error {
	const op = "Recording.Close"
	if r == nil || r.gpu == nil { // there is nothing to give back
		return nil
	}
	if err := r.original(op); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.rec == nil {
		return nil
	}
	rec := r.rec
	r.rec = nil
	if err := rec.Close(); err != nil && !errors.Is(err, cuda.ErrClosed) { // it has gone with the GPU
		return ongpu.Error(op, err)
	}
	return nil
}

// original checks that r is what Record returned.
func (r *Recording) original(op string) error {
	const what, by = "recording", "GPU.Record"
	if r == nil {
		return errs.Unmade(op, what, by)
	}
	return errs.Original(op, &r.mark, what, by)
}
