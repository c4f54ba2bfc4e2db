package cpu

import "sync"

// spare keeps what is not in use for the next caller.
type spare[T any] struct {
	mu   sync.Mutex
	list []*T
}

func (s *spare[T]) get() *T {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.list) - 1; n >= 0 {
		t := s.list[n]
		s.list = s.list[:n]
		return t
	}
	return new(T)
}

func (s *spare[T]) put(t *T) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, t)
}

func (s *spare[T]) drop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = nil
}
