package leanattention

import (
	"fmt"

	"gorgonia.org/leanattention/internal/plural"

	"gorgonia.org/tensor"
)

// singular makes "1 page" of "1 pages".
func singular(text string) string { return plural.Mend(text) }

// noCopy makes go vet report a copy of the struct that it is in (by its check
// copylocks), which an assignment of a pointer is not.
type noCopy struct{}

func (*noCopy) Lock()   {}
func (*noCopy) Unlock() {}

// byteCount is a number of bytes as people read it.
func byteCount(n int64) string {
	const units = "KMGTPE"
	if n < 1<<10 {
		return singular(fmt.Sprintf("%d bytes", n))
	}
	x, unit := float64(n)/(1<<10), 0
	for ; x >= 1<<10; unit++ {
		x /= 1 << 10
	}
	return fmt.Sprintf("%.1f %ciB", x, units[unit])
}

// String is the shape of a cache in a line.
func (c CacheConfig) String() string {
	values := ""
	if c.ValueDim != 0 && c.ValueDim != c.HeadDim {
		values = fmt.Sprintf(" and %d", c.ValueDim)
	}
	where, t := hostName, tensor.Float32
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
	return singular(fmt.Sprintf("%d layers of %d pages of %d tokens, %d KV heads of %d%s, %v, in %s",
		c.Layers, c.Pages, size, c.KVHeads, c.HeadDim, values, t, where))
}

// String is the cache's configuration and its [CacheStats], in a line.
func (c *Cache) String() string {
	if c.made("") != nil {
		return "cache that was not made by NewCache"
	}
	c.mu.Lock()
	closed := c.closed
	c.mu.Unlock()
	if closed {
		return fmt.Sprintf("closed cache of %v", c.config)
	}
	return fmt.Sprintf("cache of %v: %v", c.config, c.Stats())
}

// String is the numbers in a line.
func (s CacheStats) String() string {
	return singular(fmt.Sprintf("%d tokens of %d sequences, %d of %d pages free, %d shared, %s in %s",
		s.Tokens, s.Sequences, s.FreePages, s.Pages, s.Shared, byteCount(s.Bytes), s.Device))
}

// String is the sequence's length, in a line.
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
	return singular(fmt.Sprintf("sequence of %d tokens in %d pages%s", s.table.Tokens, len(s.table.Pages), open))
}

// String says who has the step's rows, in a line.
func (s *Step) String() string {
	if s.made("") != nil {
		return "step that was not made by NewStep"
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.open {
		return singular(fmt.Sprintf("step of %d rows, not set", s.tokens))
	}
	rows := 0
	for _, seq := range s.sequences {
		rows += seq.Queries
	}
	return singular(fmt.Sprintf("step of %d rows, set: %d rows of %d sequences", s.tokens, rows, len(s.sequences)))
}

// String is the numbers in a line.
func (s StepStats) String() string {
	return singular(fmt.Sprintf("%d runs of layers, %v in them", s.Layers, s.Attention))
}

// String says which layer it is, in a line.
func (l Layer) String() string { return fmt.Sprintf("layer %d of a %v", l.index, l.step) }

// String is the name of the function that made the option.
func (o Option) String() string { return o.kind.String() }

// String is the numbers in a line.
func (m GPUMemory) String() string {
	return fmt.Sprintf("%s of %s free, %s used here, %s pinned", byteCount(m.Free), byteCount(m.Total), byteCount(m.Used), byteCount(m.Pinned))
}

// String says where the recording is, in a line.
func (r *Recording) String() string {
	if r == nil || r.gpu == nil {
		return "recording that was not made by GPU.Record"
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.rec == nil {
		return fmt.Sprintf("closed recording on %v", r.gpu)
	}
	return fmt.Sprintf("recording on %v", r.gpu)
}
