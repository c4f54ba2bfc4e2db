package ongpu

import (
	"errors"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/queue"
)

// recorded is memory that a recording closes. No work that was queued before the recording uses the memory, so the host writes it at once.
type recorded struct{ close func() error }

func (recorded) Queue(*cuda.Stream) error { return nil }
func (recorded) Upload() error            { return nil }
func (r recorded) Close() error           { return r.close() }

// keep calls f, which makes memory, while a recording is being made, and lets the recording close the memory.
func (g *GPU) keep(f func() error, close func() error) error {
	err := g.Dev.Relaxed(f)
	if err == nil {
		err = g.Queue.Submit(func(sub *queue.Submission) error { return sub.PutOff(recorded{close}) })
	}
	if err != nil {
		return errors.Join(err, close())
	}
	return nil
}

// RecordedPlan returns a plan of its own for the recording that is being made. All replays have these sequences. The engine must exist.
func (g *GPU) RecordedPlan(op string, geometry attn.Problem, seqs []attn.Sequence) (AttentionPlan, error) {
	g.attention.Lock()
	p := g.attention.engine.NewPlan()
	g.attention.Unlock()
	err := g.keep(func() error {
		if err := g.BuildPlan(op, p, geometry, seqs, 0, nil); err != nil {
			return err
		}
		s, err := g.Dev.NewStream()
		if err == nil {
			err = errors.Join(p.Upload(s), s.Synchronize(), s.Close())
		}
		if err != nil {
			return EngineError(op, "plan", err)
		}
		return nil
	}, p.Close)
	return p, err
}

// RecordedTable returns some bytes that begin with a table, for the recording that is being made. All replays have this table.
func (g *GPU) RecordedTable(op string, table []byte, size int64) (gpu.Bytes, error) {
	var b *cuda.Buffer
	err := g.keep(func() (err error) {
		if b, err = g.Dev.NewBuffer(size); err == nil {
			err = b.Upload(0, table)
		}
		if err != nil {
			return EngineError(op, "a recording", err)
		}
		return nil
	}, func() error {
		if b == nil {
			return nil
		}
		return b.Close()
	})
	return gpu.Bytes{Buffer: b}, err
}
