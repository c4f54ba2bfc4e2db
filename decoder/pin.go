package decoder

import (
	"context"
	"fmt"
)

// Pin computes the keys and values of tokens, and keeps them in the cache until the engine is closed: texts that begin with these tokens do
// not compute them, whatever else the cache has to hold.
//
// Errors:
//
//   - [ErrConfig]: fewer than 16 tokens, which texts do not share; a wrong token; or less than Context of Options.Tokens would be left
//   - [ErrTooLong]: more tokens than Context
//   - [ErrUnsupported]: several ranks, or a network whose layers all have windows, of which the cache keeps the last tokens alone
//   - [ErrClosed], the cause of ctx, and errors of the step
func (e *Engine) Pin(ctx context.Context, tokens []int) (err error) {
	if err := e.mayKeep("Pin"); err != nil {
		return err
	}
	fail := func(kind error, format string, args ...any) error {
		return fmt.Errorf("decoder: Pin: %s: %w", fmt.Sprintf(format, args...), kind)
	}
	sizes := e.network.Sizes()
	if sizes.window() > 0 {
		return fail(ErrUnsupported, "all layers have windows, and the cache loses the first tokens of a text")
	}
	if len(tokens) < fewestShared {
		return fail(ErrConfig, "%d tokens, and texts share %d or more", len(tokens), fewestShared)
	}
	t, err := e.newText(ctx, Request{Prompt: tokens, Tokens: 1, Ends: []int{}})
	if err != nil {
		return err
	}
	t.pin = true
	pages := (len(tokens) + pageSize - 1) / pageSize
	e.mu.Lock()
	left := (e.cache.Config().Pages - e.pinned - pages) * pageSize
	if left >= e.options.Context {
		e.pinned += pages
	}
	e.mu.Unlock()
	if left < e.options.Context {
		return fail(ErrConfig, "with %d tokens, %d of Options.Tokens are left, and a text may have %d: make Tokens larger", len(tokens), max(left, 0), e.options.Context)
	}
	defer func() {
		if err != nil {
			e.mu.Lock()
			defer e.mu.Unlock()
			e.pinned -= pages
		}
	}()
	if err := e.join(t); err != nil {
		return err
	}
	if _, err := t.Wait(); err != nil {
		return err
	}
	if t.Reason() != Length {
		return context.Cause(ctx)
	}
	return nil
}
