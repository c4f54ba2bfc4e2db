package serve

import (
	"context"

	"gorgonia.org/leanattention/decoder/chat"
	"gorgonia.org/leanattention/decoder/tokenizer"
)

// Pin keeps the keys and values of a system message in the cache: see Pin of [decoder.Engine]. Without a chat template, text begins prompts.
func (s *Server) Pin(ctx context.Context, text string) error {
	// The tokens that do not depend on what follows.
	var all [2][]int
	for i, next := range []string{"a", "9"} {
		var err error
		if s.templates != nil {
			all[i], err = s.conversation([]chat.Message{{Role: "system", Content: text}, {Role: "user", Content: next}}, nil)
		} else {
			all[i], err = s.encode("Pin", text+next, tokenizer.Options{})
		}
		if err != nil {
			return err
		}
	}
	n := 0
	for n < min(len(all[0]), len(all[1])) && all[0][n] == all[1][n] {
		n++
	}
	return s.engine.Pin(ctx, all[0][:n])
}
