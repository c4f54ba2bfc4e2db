package ptx

import (
	"fmt"
	"slices"
)

// Run executes a launch.
func (k *Kernel) Run(l Launch, memory Memory) error {
	return RunTogether(Start{k, l, memory})
}

// Start is a launch on one GPU, which may run at the same time as launches on other GPUs.
type Start struct {
	*Kernel
	Launch
	Memory Memory
}

// RunTogether executes launches on several GPUs at the same time. Their warps alternate.
func RunTogether(starts ...Start) error {
	var live []*Running
	clock := new(int64)
	for i := range starts {
		if starts[i].Clock == nil {
			starts[i].Clock = clock
		}
		r, err := starts[i].Begin()
		if err != nil {
			return err
		}
		live = append(live, r)
	}
	idle := 0
	for len(live) > 0 {
		at := 0
		if len(live) > 1 {
			at = live[0].m.rng.IntN(len(live))
		}
		m := live[at].m
		progress, err := m.round()
		if err != nil {
			return err
		}
		if m.exited == m.Grid {
			if err := m.end(); err != nil {
				return err
			}
			live = slices.Delete(live, at, at+1)
			idle = 0
			continue
		}
		if progress {
			idle = 0
			continue
		}
		switch idle++; {
		case idle > 20000*len(live):
			return fmt.Errorf("ptx: %s: all threads wait: %s", m.name, m.where())
		case idle > 1000*len(live):
			*m.Clock += IdleTime
		}
	}
	return nil
}

// IdleTime is the advance of the clock in nanoseconds per turn, after several turns in which all threads only
// waited. It shortens waits for a time.
const IdleTime = 50_000_000

// Running is a launch in progress.
type Running struct{ m *machine }

// Begin starts a launch. [Running.Turn] continues it.
func (s *Start) Begin() (*Running, error) {
	m, err := s.machine()
	if err != nil {
		return nil, err
	}
	return &Running{m}, nil
}

// Turn runs the launch for a while. It reports whether the launch has ended, and whether there was progress.
// A launch without progress may wait for another launch. After an error the launch is over.
func (r *Running) Turn() (ended, progress bool, err error) {
	m := r.m
	for n := m.rng.IntN(3); ; n-- {
		if progress, err = m.round(); err != nil {
			return false, false, err
		}
		if m.exited == m.Grid {
			return true, true, m.end()
		}
		if n == 0 || !progress {
			return false, progress, nil
		}
	}
}

// Reaches sets the memory that the launch may access from now on.
func (r *Running) Reaches(memory Memory) {
	r.m.memory, r.m.last = memory, [2]Range{}
	r.m.peers = memory.peers()
}

// Where describes the positions of the launch's threads.
func (r *Running) Where() string { return r.m.name + ": " + r.m.where() }
