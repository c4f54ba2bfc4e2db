package model

import (
	"errors"
	"fmt"

	la "gorgonia.org/leanattention"
)

// Fork is a sequence as it was when it was forked. Its keys and values stay in pages that it shares with its
// continuations.
type Fork struct {
	decoder  *Decoder
	sequence *la.Sequence // nil: released
	tokens   int
}

// Fork keeps sequence i as it is now, for [Decoder.Return]. A fork needs pages for writes to shared pages:
// [Options].ForkTokens counts them. Gorgonia's own nodes have no cache that could be forked.
func (d *Decoder) Fork(i int) (*Fork, error) {
	c, err := d.pages(i)
	if err != nil {
		return nil, err
	}
	s, err := c.sequences[i].Fork()
	if err != nil {
		return nil, err
	}
	return &Fork{decoder: d, sequence: s, tokens: d.lengths[i]}, nil
}

// Return makes sequence i the forked sequence, and drops its present content. A fork can be returned to once: fork
// again to return again. The sequence has no logits until it is continued.
func (d *Decoder) Return(i int, f *Fork) error {
	c, err := d.pages(i)
	switch {
	case err != nil:
		return err
	case f == nil || f.decoder != d:
		return fmt.Errorf("%w: a fork of another decoder", ErrConfig)
	case f.sequence == nil:
		return fmt.Errorf("%w: the fork was returned to or released", ErrConfig)
	case f.tokens > d.options.Capacity[i]:
		return fmt.Errorf("%w: a fork of %d tokens for sequence %d, whose capacity is %d", ErrConfig, f.tokens, i, d.options.Capacity[i])
	}
	return d.replace(c, i, f.take(), f.tokens)
}

// Release drops a fork.
func (f *Fork) Release() error {
	if f == nil || f.sequence == nil {
		return fmt.Errorf("%w: the fork was returned to or released", ErrConfig)
	}
	return f.take().Release()
}

// Shared is the beginning of a sequence: the first tokens of an earlier sequence.
type Shared struct {
	From   int // the other sequence
	Tokens int // number of its tokens; 0: none
}

// checkShared refuses invalid sharing.
func (o *Options) checkShared() error {
	if o.Shared == nil {
		return nil
	}
	if len(o.Shared) != len(o.Capacity) {
		return fmt.Errorf("%w: what %d of %d sequences share", ErrConfig, len(o.Shared), len(o.Capacity))
	}
	for i, s := range o.Shared {
		switch {
		case s.Tokens == 0:
		case s.From < 0 || s.From >= i || s.Tokens < 0 || s.Tokens > min(o.Capacity[i], o.Capacity[s.From]):
			return fmt.Errorf("%w: %d tokens that sequence %d shares with sequence %d", ErrConfig, s.Tokens, i, s.From)
		case !o.paged():
			return fmt.Errorf("%w: Gorgonia's own nodes have no cache that could be shared", ErrConfig)
		}
	}
	return nil
}

// Share makes an empty sequence begin with the tokens of [Options].Shared. The other sequence must have them already,
// and may have more. Their keys and values are not computed again, and both sequences share their pages.
func (d *Decoder) Share(i int) error {
	c, err := d.pages(i)
	if err != nil {
		return err
	}
	if d.options.Shared == nil || d.options.Shared[i].Tokens == 0 {
		return fmt.Errorf("%w: sequence %d shares nothing", ErrConfig, i)
	}
	s := d.options.Shared[i]
	if d.lengths[i] != 0 || d.lengths[s.From] < s.Tokens {
		return fmt.Errorf("%w: sequence %d of %d tokens shares %d of sequence %d, which has %d", ErrConfig, i, d.lengths[i], s.Tokens, s.From, d.lengths[s.From])
	}
	f, err := c.sequences[s.From].Fork()
	if err != nil {
		return err
	}
	if err := f.Truncate(s.Tokens); err != nil {
		return errors.Join(err, f.Release())
	}
	return d.replace(c, i, f, s.Tokens)
}

// take takes the sequence out of the fork.
func (f *Fork) take() *la.Sequence {
	s := f.sequence
	f.sequence = nil
	return s
}

// replace makes s, with the given number of tokens, sequence i.
func (d *Decoder) replace(c *leanCache, i int, s *la.Sequence, tokens int) error {
	old := c.sequences[i]
	c.sequences[i] = s
	d.forget(i, tokens)
	return old.Release()
}

// pages returns the cache of pages of sequence i.
func (d *Decoder) pages(i int) (*leanCache, error) {
	c, ok := d.cache.(*leanCache)
	switch {
	case d.closed:
		return nil, fmt.Errorf("%w: the decoder is closed", ErrConfig)
	case i < 0 || i >= len(d.lengths):
		return nil, fmt.Errorf("%w: sequence %d of %d", ErrConfig, i, len(d.lengths))
	case !ok:
		return nil, fmt.Errorf("%w: Gorgonia's own nodes have no cache of pages", ErrConfig)
	}
	return c, nil
}
