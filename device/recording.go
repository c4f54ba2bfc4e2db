package device

import (
	"errors"
	"fmt"
	"sync"

	"gorgonia.org/leanattention/internal/ongpu"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/nocopy"
	"gorgonia.org/leanattention/internal/queue"
)

// Recording is the work of a graph's run on a GPU, kept to be queued again as
// one: a decode step is a hundred launches or more, which the host needs longer
// to queue one by one than a fast GPU needs to do them.
//
// A Recording is used by its pointer. A copy of a Recording is [ErrState] wherever it is used.
type Recording struct {
	mark nocopy.Mark
	mu   sync.Mutex
	gpu  *GPU
	rec  *queue.Recording // nil: closed
}

// Record calls run, which runs a graph whose values are on the GPU, and keeps the
// work instead of having it done. A graph must have run before, so that its nodes
// have their memory:
//
//	step.Run(appends, machine.RunAll)                 // the first time
//	machine.Reset()
//	...
//	step.Set(appends)
//	recording, err := gpu.Record(machine.RunAll)      // the second time
//	machine.Reset()
//	recording.Replay()                                // Record has done nothing yet
//	step.Commit()
//	...
//	for {
//		input.CopyFrom(tokens)
//		step.Run(appends, recording.Replay)           // from then on
//	}
//
// What a replay computes is in the values that the nodes had after Record.
// Inputs are read anew: [Tensor.CopyFrom] changes them. The lengths of a
// [Step] are inputs too, but its pages, and the machine's graph, are those of the
// recording.
//
// Layers of few rows that make each other's inputs may be one launch in a
// recording (Linear and Linears of package nn, and [CachedAttention] without [WithRotary], from compute
// capability 9.0 on), which may begin with Embeddings and end with an ArgMax. It
// adds in another order, so a replay's results differ from the machine's by
// rounding; from replay to replay they have the same bits.
//
// A recording that is made of a step with a tree ([Append.Tree]) is for steps with trees and
// without. One of a step without is for such steps alone: Replay is [ErrState] for others, and
// right again behind them. So a decoder that does both may have one of each. On a cache that is sharded by context ([Shard])
// the same is true of several new tokens of a sequence: a recording of a step without is for such steps alone.
//
// Sequences of a step that share pages may attend to them at once, which is another schedule. Replays
// do so if the step did that Record had, and else no later one of the step does: results are the same but for
// rounding.
//
// Copies from and to the host are not part of a recording: [ToGPU], [ToHost]
// and downloads are [ErrUnsupported] in run, as is [Attention], whose schedule is
// the host's. Nothing else may be asked of the GPU while run runs. What run may not do is an error, and nothing waits:
//
//   - [GPU.Close], [Cache.Close] of a cache on the GPU, [Recording.Replay], and Record itself: [ErrState]
//   - [Step.Set] and [Sequence.Keep] of such a cache, which would be done at each replay and not now: [ErrState]
//   - [GPU.Synchronize], [Sequence.WriteTo], [Cache.ReadSequence], and all that copies from or to the host: [ErrUnsupported]
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

// Replay queues the work again. Where it would not be what the graph computes
// now, it is [ErrState] and nothing is queued: a [Step] that is not set, or one
// whose schedule looks different, since sequences share so many pages that its
// table had to grow. Then the graph has to run, and to be recorded anew.
// Errors: [ErrClosed] too, if the recording, its cache, the GPU or a tensor of
// it was closed or freed.
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

// String says where the recording is, in a line.
func (r *Recording) String() string {
	if r.original("") != nil {
		return "recording that was not made by GPU.Record"
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.rec == nil {
		return fmt.Sprintf("closed recording on %v", r.gpu)
	}
	return fmt.Sprintf("recording on %v", r.gpu)
}
