package page

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestLists: no list of a doc comment is part of a block of code. gofmt makes it one if the list follows the block and no text is between them.
func TestLists(t *testing.T) {
	const top = "../../.."
	inCode := regexp.MustCompile(`(?m)^//\t+ +- [A-Z\[].*$`)
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(d.Name(), ".") && path != top:
			return filepath.SkipDir
		case filepath.Ext(path) != ".go":
			return nil
		}
		text, err := os.ReadFile(path)
		for _, line := range inCode.FindAllString(string(text), -1) {
			t.Errorf("%s: this line of a list is code: %s", path, line)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
