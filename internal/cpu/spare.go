package cpu

import "sync"

// A Spare keeps unused values for the next caller.
type Spare[T any] struct {
	mu   sync.Mutex
	list []*T
}

// Get returns a value from Put, or a new one.
func (s *Spare[T]) Get() *T {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.list) - 1; n >= 0 {
		t := s.list[n]
		s.list = s.list[:n]
		return t
	}
	return new(T)
}

// Put keeps t, which the caller no longer uses.
func (s *Spare[T]) Put(t *T) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, t)
}

// Drop forgets all values.
func (s *Spare[T]) Drop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = nil
}
