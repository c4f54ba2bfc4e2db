package decoder

import "slices"

// checkKeep checks the number of tokens that [Request].Cut and [Request].Shift keep.
func (r *Request) checkKeep(context int) error {
	if r.Keep < 0 || r.Keep >= context {
		return requestError(ErrConfig, "Keep is %d, not in [0, %d) of Options.Context", r.Keep, context)
	}
	return nil
}

// cut returns the prompt, shortened by Cut to fit into a context.
func (r *Request) cut(context int) []int {
	if !r.Cut || len(r.Prompt) <= context {
		return r.Prompt
	}
	last := (context - r.Keep + 1) / 2
	if r.Tokens > 0 {
		last = max(last, context+1-r.Keep-r.Tokens) // the last token of a text is not read
	}
	return slices.Concat(r.Prompt[:r.Keep], r.Prompt[len(r.Prompt)-last:])
}

// setLimit sets the limit of a text: that of Request.Tokens, or that of the context.
func (t *Text) setLimit() {
	t.limit, t.full = t.context, true
	if more := t.most - t.added(); t.most > 0 && more <= t.context-len(t.tokens) {
		t.limit, t.full = len(t.tokens)+more, false
	}
}

// added returns the number of tokens that were chosen.
func (t *Text) added() int { return len(t.tokens) + t.dropped - t.prompt }

// shift drops tokens of the texts whose context is full. Other texts may begin with the same prompt, so at the first shift a
// sequence of all tokens is retained.
func (s *scheduler) shift() error {
	for _, t := range slices.Concat(s.live, s.waiting) {
		if len(t.tokens) < t.limit {
			continue
		}
		if t.seq != nil {
			if !t.shifted {
				all, err := t.seq.Fork()
				if err != nil {
					return err
				}
				s.retain(prefix{tokens: t.tokens[:all.Len()], seq: all})
			}
			keep := min(t.keep, t.seq.Len())
			if !begins(t.seq, keep) {
				keep = 0
			}
			if err := t.seq.Truncate(keep); err != nil {
				return err
			}
		}
		t.shifted = true
		s.swap.drop(t)
		t.drop()
		s.stats.Shifted++
	}
	return nil
}

// drop drops the older half of the tokens after those that stay.
func (t *Text) drop() {
	n := (len(t.tokens) - t.keep + 1) / 2
	t.tokens = slices.Concat(t.tokens[:t.keep], t.tokens[t.keep+n:])
	t.mu.Lock()
	t.dropped += n
	t.mu.Unlock()
	t.setLimit()
}

// Dropped returns how many tokens the text has lost by [Request].Cut and [Request].Shift.
func (t *Text) Dropped() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.dropped
}
