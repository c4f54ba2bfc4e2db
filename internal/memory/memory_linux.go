package memory

import (
	"io/fs"
	"os"
)

func now() (Free, bool) { return ofLinux(os.DirFS("/").(fs.ReadFileFS)) }
