package decoder

import (
	"path/filepath"
	"testing"

	"gorgonia.org/leanattention/docs/internal/page"
)

// The code of docs/decoder.md is code of examples/opt or of examples/llama, whose tests check the outputs.
func TestPage(t *testing.T) {
	text := page.Read(t, "../decoder.md")
	var files []string
	for _, folder := range []string{"opt", "llama"} {
		all, err := filepath.Glob("../../examples/" + folder + "/*.go")
		if err != nil || all == nil {
			t.Fatal(all, err)
		}
		files = append(files, all...)
	}
	page.Code(t, text, files...)
	page.Links(t, text, "..")
}
