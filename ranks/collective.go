package ranks

import (
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/nccl"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/queue"
)

// Internal is for the packages of this module.
func (c *Comm) Internal() ongpu.Comm { return collectives{c} }

// collectives queues what all ranks do together.
type collectives struct{ *Comm }

func (t collectives) Queue(w *ongpu.Work, kind ongpu.Collective, n, from int) error {
	c := t.Comm
	if err := c.Err(); err != nil {
		return err
	}
	if c.gpu == nil {
		return fmt.Errorf("x is on a GPU, and the ranks have joined without GPUs: keep x in host memory: %w", errs.ErrUnsupported)
	}
	l := &collective{comm: c, kind: kind, src: part(w.In[0].Memory, n), dst: part(w.Out, n), from: from}
	if !w.Recording() {
		return w.Do(l.Queue)
	}
	w.Depend(func(r queue.Recorded) bool { return r == recorded{c} }, func() queue.Recorded { return recorded{c} })
	l.release = c.hold()
	if err := w.PutOff(l); err != nil {
		l.release()
		return err
	}
	return nil
}

// Exchange is that of all ranks' host memory.
func (t collectives) Exchange(label string, parts [][]byte) ([][]byte, error) {
	c := t.Comm
	if err := c.Err(); err != nil {
		return nil, err
	}
	if c.gpu != nil {
		return nil, fmt.Errorf("x is in host memory, and the ranks have joined with GPUs: want a tensor on the rank's GPU: %w", errs.ErrUnsupported)
	}
	if c.session == nil {
		return parts, nil
	}
	got, err := c.session.Exchange(label, parts)
	return got, rankError(err)
}

func part(m gpu.Memory, n int) nccl.Part { return nccl.Part{Buffer: m.Buffer, Offset: m.Offset, N: n} }

// collective is one that is queued at once, or in a recording as what is put off, which ends
// with the recording.
type collective struct {
	comm     *Comm
	kind     ongpu.Collective
	src, dst nccl.Part
	from     int
	release  func() // what the recording holds; nil: there is none
}

// Queue queues it.
func (l *collective) Queue(s *cuda.Stream) error {
	c := l.comm
	at := slices.IndexFunc(c.members, func(m member) bool { return s.Of(m.dev) })
	if at < 0 {
		return fmt.Errorf("x is on another GPU than rank %d's, %v: %w", c.world.Rank, c.gpu, queue.ErrRank)
	}
	var err error
	switch m := c.members[at].nccl; l.kind {
	case ongpu.Sum:
		err = m.AllReduce(s, l.dst, l.src, nccl.Float32)
	default:
		err = m.Broadcast(s, l.dst, l.src, nccl.Int32, l.from) // it moves words
	}
	if e := c.failed(); e != nil {
		return e
	}
	switch {
	case errors.Is(err, nccl.ErrAborted):
		return errors.Join(queue.ErrRank, err)
	case err != nil && !errors.Is(err, cuda.ErrClosed):
		c.session.Fail(err) // the others wait for it
		return c.Err()
	}
	return err
}

// Upload has nothing to bring.
func (l *collective) Upload() error { return nil }

// Close lets the communicator go.
func (l *collective) Close() error {
	l.release()
	return nil
}

// recorded is a communicator that a recording depends on.
type recorded struct{ comm *Comm }

func (r recorded) Ready() error { return r.comm.Err() }
func (r recorded) Done(bool)    {}
