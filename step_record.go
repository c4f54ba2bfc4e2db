package leanattention

import (
	"gorgonia.org/leanattention/internal/kvstore"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/queue"
)

// stepRecord is a step whose layers are in a recording.
type stepRecord struct {
	step  *Step
	nodes []recordedNode
}

type recordedNode struct {
	*stepNode
	schedule   kvstore.Schedule
	rows       int
	generation uint64
}

// record notes a node's work in the recording that is being made, if any. The
// step's mu is held.
func (s *Step) record(sub *queue.Submission, n *stepNode, schedule kvstore.Schedule) {
	same := func(r queue.Recorded) bool {
		of, ok := r.(*stepRecord)
		return ok && of.step == s
	}
	r := sub.Depend(same, func() queue.Recorded { return &stepRecord{step: s} })
	if r == nil {
		return
	}
	of := r.(*stepRecord)
	of.nodes = append(of.nodes, recordedNode{n, schedule, n.plan.rows, schedule.Generation()})
	schedule.Keep()
}

// Ready holds the step until Done.
func (r *stepRecord) Ready() error {
	s := r.step
	s.cache.running.RLock()
	s.mu.Lock()
	err := func() error {
		switch {
		case s.cache.closed:
			return ongpu.ErrCacheClosed
		case !s.open:
			return ongpu.ErrNotReady
		}
		for _, n := range r.nodes {
			if err := n.schedule.Unfit(); err != nil && n.plan.turn == s.turn {
				return err
			}
			if n.plan.turn != s.turn || n.plan.rows != n.rows || n.schedule.Generation() != n.generation {
				return ongpu.ErrNotReady
			}
		}
		return nil
	}()
	if err != nil {
		s.mu.Unlock()
		s.cache.running.RUnlock()
	}
	return err
}

// Done is a run of the step's graph.
func (r *stepRecord) Done(queued bool) {
	s := r.step
	s.run++
	s.began = s.began || queued
	for _, n := range r.nodes {
		n.run, s.ran[n.layer] = s.run, 0
		if queued {
			s.ran[n.layer] = s.run
			s.layers++
		}
	}
	s.mu.Unlock()
	s.cache.running.RUnlock()
}

// nodeOf is a node of a step, as stores of pages see it.
type nodeOf struct {
	step *Step
	*stepNode
}

func (n nodeOf) Record(sub *queue.Submission, s kvstore.Schedule) { n.step.record(sub, n.stepNode, s) }
